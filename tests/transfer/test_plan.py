"""Every (layer, head) is sent exactly once, whatever the topologies."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.plan import PlanError, Shard, Topology, TransferPlan

LAYERS, HEADS = 12, 4


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    layer_cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=5)))
    head_cuts = sorted(draw(st.sets(st.integers(1, HEADS - 1), max_size=2)))
    layers = list(zip([0, *layer_cuts], [*layer_cuts, LAYERS], strict=True))
    heads = list(zip([0, *head_cuts], [*head_cuts, HEADS], strict=True))
    cells = draw(st.permutations(list(product(layers, heads))))
    return Topology.uniform(tuple(Shard(rank, *cell) for rank, cell in enumerate(cells)), 16, 64 * HEADS)


@given(topologies(), topologies())
def test_every_layer_and_head_is_sent_exactly_once(source: Topology, destination: Topology) -> None:
    plan = TransferPlan(source, destination)
    received: dict[tuple[int, int, int], int] = {}
    for shard in source.shards:
        for target in plan.targets(shard.rank):
            for layer, head in product(range(*target.layers), range(*target.heads)):
                assert shard.layers[0] <= layer < shard.layers[1] and shard.heads[0] <= head < shard.heads[1]
                received[target.rank, layer, head] = received.get((target.rank, layer, head), 0) + 1
    wanted = {
        (shard.rank, layer, head): 1
        for shard in destination.shards
        for layer, head in product(range(*shard.layers), range(*shard.heads))
    }
    assert received == wanted


@given(topologies(), topologies(), st.integers(1, 1000))
def test_both_ends_read_the_same_plan(source: Topology, destination: Topology, tokens: int) -> None:
    plan = TransferPlan(source, destination)
    there = [(s.rank, t.rank, t.layers, t.heads) for s in source.shards for t in plan.targets(s.rank)]
    here = [(s.rank, d.rank, s.layers, s.heads) for d in destination.shards for s in plan.sources(d.rank)]
    assert sorted(there) == sorted(here)
    weight = sum(plan.bytes(target, tokens) for s in source.shards for target in plan.targets(s.rank))
    assert weight == tokens * LAYERS * source.bytes_per_token[0]


@given(topologies(), topologies())
def test_the_sampler_always_reaches_destination_rank_0(source: Topology, destination: Topology) -> None:
    plan = TransferPlan(source, destination)
    assert 0 in [target.rank for target in plan.targets(plan.sampler)]
    assert plan.sampler in [flow.rank for flow in plan.sources(0)]


def shards(*cells: tuple[tuple[int, int], tuple[int, int]]) -> tuple[Shard, ...]:
    return tuple(Shard(rank, layers, heads) for rank, (layers, heads) in enumerate(cells))


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ([], "1 to 256"),
        ([((0, 4), (0, 1)), ((3, 8), (0, 1))], "same"),
        ([((0, 4), (0, 1)), ((5, 8), (0, 1))], "without a rank"),
        ([((4, 4), (0, 1))], "impossible range"),
        ([((1, 8), (0, 1))], "without a rank"),
    ],
)
def test_what_does_not_tile_is_refused(cells: list[tuple[tuple[int, int], tuple[int, int]]], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Topology.uniform(shards(*cells), 16, 64)


def test_a_topology_from_the_wire_is_checked_too() -> None:
    good = {
        "shards": [{"rank": 0, "layers": [0, 2], "heads": [0, 3]}],
        "page_size": 16,
        "bytes_per_token": [96, 96],
        "windows": [0, 4],
    }
    msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=Topology)
    for field, value, reason in (
        ("bytes_per_token", [64, 96], "divide"),
        ("bytes_per_token", [96], "of 1 layers, shards of 2"),
        ("windows", [], "of 0 layers, shards of 2"),
        ("windows", [0, -1], "number of positions"),
    ):
        with pytest.raises(msgspec.ValidationError, match=reason):
            msgspec.msgpack.decode(msgspec.msgpack.encode({**good, field: value}), type=Topology)


def test_instances_that_differ_are_refused_with_both_values() -> None:
    one = shards(((0, 4), (0, 2)))
    a = Topology.uniform(one, 16, 64)
    with pytest.raises(PlanError, match="16 at the source, 32 at the destination"):
        TransferPlan(a, Topology.uniform(one, 32, 64))
    with pytest.raises(PlanError, match=r"windows: 0 at the source, \(0, 0, 8, 0\) at the destination"):
        TransferPlan(a, Topology(one, 16, (64,) * 4, (0, 0, 8, 0)))


def test_layers_may_differ_in_bytes_and_in_how_far_back_they_look() -> None:
    """Layers 1 and 2 with a window of 6: the token after a prompt of 10 sees positions 5 to 9, and itself."""
    source = Topology(shards(((0, 2), (0, 2)), ((2, 4), (0, 2))), 4, (64, 64, 16, 16), (0, 6, 6, 0))
    destination = Topology(shards(((0, 4), (0, 2))), 4, (64, 64, 16, 16), (0, 6, 6, 0))
    plan = TransferPlan(source, destination)
    (first,), (second,) = plan.targets(0), plan.targets(1)
    assert [source.first(layer, 10) for layer in range(4)] == [0, 5, 5, 0]
    assert [source.first(layer, 3) for layer in range(4)] == [0, 0, 0, 0]
    assert (plan.positions(first, 10), plan.positions(second, 10)) == (15, 15)
    assert (plan.bytes(first, 10), plan.bytes(second, 10)) == (10 * 64 + 5 * 64, 5 * 16 + 10 * 16)
