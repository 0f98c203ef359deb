"""Which pair a request gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.instances import Fleet, Instance, Pair, Side, why_unpairable
from gateway.policies import Load
from gateway.router import Cost, Router


def instance(side: Side, name: str) -> Instance:
    return Instance(
        dialed=f"{name}:1", side=side, instance_id=name, address=f"{name}:1", epoch=1, protocol_version=1,
        model_name="m", model_digest="d", num_layers=2, kv_heads=1, head_dim=8, page_size=16, kv_dtype="float32",
        max_model_len=100, pages=4, vocab_size=10, transfer_backend="b",
    )  # fmt: skip


P = [instance(Side.PREFILL, f"p{i}") for i in range(3)]
D = [instance(Side.DECODE, f"d{i}") for i in range(3)]


def chosen(router: Router, fleet: Fleet, cost: Cost) -> Pair:
    pair = router.choose(fleet, 0.0)
    assert isinstance(pair, Pair)
    router.started(pair, cost, 0.0)
    return pair


def test_equal_instances_take_turns() -> None:
    router, fleet, cost = Router(), Fleet(tuple(P[:2]), tuple(D)), Cost(10, 5)
    names = []
    for _ in range(6):
        pair = chosen(router, fleet, cost)
        names.append(pair.prefill.instance_id + pair.decode.instance_id)
        router.ended(pair.prefill, cost)
        router.ended(pair.decode, cost)
    assert names == ["p0d0", "p1d1", "p0d2", "p1d0", "p0d1", "p1d2"]


def test_the_least_work_is_chosen() -> None:
    router, fleet = Router(), Fleet(tuple(P[:2]), tuple(D[:2]))
    big = chosen(router, fleet, Cost(50, 50))
    for _ in range(4):
        small = chosen(router, fleet, Cost(10, 10))
        assert small.prefill is not big.prefill
        assert small.decode is not big.decode
    router.ended(big.prefill, Cost(50, 50))
    assert chosen(router, fleet, Cost(1, 1)).prefill is big.prefill


def test_incompatible_instances_are_never_paired() -> None:
    other = replace(D[0], page_size=32)
    assert why_unpairable(P[0], other) == "page size 16 and 32"
    pair = chosen(Router(), Fleet((P[0],), (other, D[1])), Cost(1, 1))
    assert pair.decode is D[1]
    reason = Router().choose(Fleet((P[0],), (other,)), 0.0)
    assert reason == "no prefill instance is compatible with a decode instance: page size 16 and 32"


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_digest", "e"), ("kv_dtype", "bfloat16"), ("protocol_version", 2), ("transfer_backend", "c"),
     ("num_layers", 3), ("kv_heads", 2), ("head_dim", 4)],
)  # fmt: skip
def test_what_must_agree(field: str, value: object) -> None:
    assert why_unpairable(P[0], replace(D[0], **{field: value})) is not None


def test_a_prefill_without_partner_is_passed_over() -> None:
    lonely = replace(P[0], model_digest="old")
    assert chosen(Router(), Fleet((lonely, P[1]), (D[0],)), Cost(1, 1)).prefill is P[1]


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        (Fleet(), "no prefill and no decode instance is serving"),
        (Fleet((P[0],), ()), "no decode instance is serving"),
        (Fleet((), (D[0],)), "no prefill instance is serving"),
    ],
)
def test_without_a_pair_the_reason_is_told(fleet: Fleet, reason: str) -> None:
    assert Router().choose(fleet, 0.0) == reason


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=30))
def test_after_all_ended_every_load_is_zero(costs: list[tuple[int, int]]) -> None:
    router, fleet = Router(), Fleet(tuple(P), tuple(D))
    given_out = [(chosen(router, fleet, Cost(*cost)), Cost(*cost)) for cost in costs]
    for pair, cost in given_out:
        router.ended(pair.prefill, cost)
        router.ended(pair.decode, cost)
    for one in (*P, *D):
        assert router.load_of(one) == Load(0, 0, router.load_of(one).last_chosen)


def test_what_fits_is_what_fits_everywhere() -> None:
    roomy = replace(D[0], pages=100)
    assert Fleet((replace(P[0], pages=0),), (roomy,)).context_limit() == 100, "0 pages: not told"
    assert Fleet((P[0],), (roomy,)).context_limit() == 64
    assert Fleet().context_limit() is None
