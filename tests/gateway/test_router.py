"""Which pair a request gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.instances import Fleet, Instance, Pair, Side, why_unpairable
from gateway.policies import Cost, Load, Placing
from gateway.router import NoPair, Router
from gateway.workbook import Entry


def instance(side: Side, name: str) -> Instance:
    return Instance(
        dialed=f"{name}:1", side=side, instance_id=name, address=f"{name}:1", epoch=1, protocol_version=1,
        model_name="m", model_digest="d", num_layers=2, kv_heads=1, head_dim=8, page_size=16, kv_dtype="float32",
        max_model_len=100, pages=4, vocab_size=10, transfer_backend="b",
    )  # fmt: skip


P = [instance(Side.PREFILL, f"p{i}") for i in range(3)]
D = [instance(Side.DECODE, f"d{i}") for i in range(3)]


def started(router: Router, fleet: Fleet, cost: Cost) -> tuple[Pair, list[Entry]]:
    pair = router.choose(fleet, Placing(cost), 0.0)
    assert isinstance(pair, Pair)
    return pair, list(router.started(pair, Placing(cost), 0.0).values())


def chosen(router: Router, fleet: Fleet, cost: Cost) -> Pair:
    return started(router, fleet, cost)[0]


def test_equal_instances_take_turns() -> None:
    router, fleet, cost = Router(), Fleet(tuple(P[:2]), tuple(D)), Cost(10, 5)
    names = []
    for _ in range(6):
        pair, entries = started(router, fleet, cost)
        names.append(pair.prefill.instance_id + pair.decode.instance_id)
        for entry in entries:
            router.ended(entry)
    assert names == ["p0d0", "p1d1", "p0d2", "p1d0", "p0d1", "p1d2"]


def test_the_least_work_is_chosen() -> None:
    router, fleet = Router(), Fleet(tuple(P[:2]), tuple(D[:2]))
    big, (computing, _) = started(router, fleet, Cost(30, 30))
    for _ in range(4):
        small = chosen(router, fleet, Cost(7, 7))
        assert small.prefill is not big.prefill
        assert small.decode is not big.decode
    router.ended(computing)
    assert chosen(router, fleet, Cost(1, 1)).prefill is big.prefill


def test_incompatible_instances_are_never_paired() -> None:
    other = replace(D[0], page_size=32)
    assert why_unpairable(P[0], other) == "page size 16 and 32"
    pair = chosen(Router(), Fleet((P[0],), (other, D[1])), Cost(1, 1))
    assert pair.decode is D[1]
    none = Router().choose(Fleet((P[0],), (other,)), Placing(Cost(1, 1)), 0.0)
    assert none == NoPair("no prefill instance is compatible with a decode instance: page size 16 and 32")


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
    assert Router().choose(fleet, Placing(Cost(1, 1)), 0.0) == NoPair(reason)


@given(st.lists(st.tuples(st.integers(1, 32), st.integers(1, 32)), max_size=30))
def test_after_all_ended_every_load_is_zero(costs: list[tuple[int, int]]) -> None:
    router, fleet = Router(), Fleet(tuple(P), tuple(D))
    for entry in [entry for cost in costs for entry in started(router, fleet, Cost(*cost))[1]]:
        router.ended(entry)
    for one in (*P, *D):
        assert router.load_of(one) == Load(0, 0, 0.0, router.load_of(one).last_chosen)


def test_a_request_goes_only_where_it_fits() -> None:
    """Pools and contexts may differ from pair to pair: the largest says what is taken, each what it gets."""
    roomy = replace(D[0], pages=100, instance_id="roomy", dialed="roomy:1")
    fleet = Fleet((replace(P[0], pages=0),), (D[1], roomy))
    assert (fleet.context_limit, fleet.common_limit) == (100, 64), "0 pages: not told"
    assert {chosen(Router(), fleet, Cost(60, 5)).decode for _ in range(3)} == {roomy}
    assert {chosen(Router(), Fleet(fleet.prefills, (D[1],)), Cost(60, 4)).decode} == {D[1]}
    none = Router().choose(Fleet((P[0],), (D[1],)), Placing(Cost(60, 5)), 0.0)
    assert none == NoPair("of the pairs that serve none takes 65 tokens; the largest takes 64")
    assert Fleet().context_limit is None
