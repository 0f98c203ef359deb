"""Rows T1–T11 and D1–D5 of the field scenarios, as far as they belong into the simulator."""

from __future__ import annotations

from itertools import product

import pytest

from sim.case import CRASH, CUT, FAIL_LATE, FAIL_QUIET, MS, SECOND, STALL, Fault
from sim.rank import RankProcess
from sim.world import World
from tests.sim.clusters import case, passes, request, watch
from transfer.actions import Observe, Peer, Submit
from transfer.extents import ExtentsError, extents
from transfer.messages import Destinations
from transfer.plan import Shard, Topology
from transfer.sender import SendingSide

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("late", [0, 1])
def test_T1_slices_of_one_rank_arrive_much_later(late: int) -> None:
    stall = Fault(STALL, 0, "P0", late, 3 * SECOND, 50)
    world = World(case(*(request(f"r{i}", at=i * MS) for i in range(4)), faults=(stall,)))
    result = passes(world)
    assert all(outcome == "ok" for outcome in result.outcomes.values())
    assert result.virtual > SECOND


def test_T2_pages_of_an_aborted_room_are_not_reused_before_the_stall_ends() -> None:
    first = request("a", prompt=14, output=2, cancel=30 * MS)
    second = request("b", at=35 * MS, prompt=14, output=2)
    stall = Fault(STALL, 0, "P0", 0, 2 * SECOND, 2)
    world = World(case(first, second, p=1, d=1, faults=(stall,), decode={"pages": 4}))
    quarantined: list[int] = []
    started: list[int] = []

    def look(process: RankProcess) -> None:
        counts = process.core.replica.leases.count()
        if counts["quarantined"]:
            quarantined.append(world.clock.now)
        if any(r.key.request == "b" for r in process.core.replica.states["transferring"].values()):
            started.append(world.clock.now)

    watch(world, "D0", look)
    result = passes(world)
    assert result.outcomes == {"a": "cancelled", "b": "ok", "probe0": "ok"}
    assert quarantined and started and started[0] >= quarantined[-1] > SECOND, "b waited for a's pages"


def test_T3_abort_at_every_moment_of_a_chunked_prompt() -> None:
    for cancel in range(500, 40_000, 700):
        passes(case(request(prompt=24, output=3, cancel=cancel), request("r1", at=MS), prefill={"chunk": 8}, p=2, d=2))


@pytest.mark.parametrize("kind", [FAIL_QUIET, FAIL_LATE])
def test_T4_a_failed_post_on_one_rank_costs_a_retry_not_a_timer(kind: str) -> None:
    fault = Fault(kind, 0, "P0", 1, 100 * MS, 1)
    world = World(case(request(), faults=(fault,)))
    ended: list[int] = []

    def look(process: RankProcess) -> None:
        if process.rank == 0 and not process.core.replica.requests:
            ended.append(world.clock.now)

    watch(world, "D0", look)
    result = passes(world)
    assert result.outcomes["r0"] == "ok" and len(world.gateway.clients["r0"].attempts) == 2
    assert any(0 < time < SECOND for time in ended)


@pytest.mark.parametrize("length", [1, 100, 2000, 20_000])
def test_T5_after_a_link_healed_the_next_request_works(length: int) -> None:
    cut = Fault(CUT, 5 * MS, rank=0, value=0, length=length * MS)
    world = World(case(request(), request("r1", at=10 * MS), faults=(cut,)))
    result = passes(world)  # probes every pair at the end: one attempt each
    assert result.outcomes["probe0"] == "ok"


def test_T9_more_source_pages_than_destinations_is_an_error_and_writes_nothing() -> None:
    with pytest.raises(ExtentsError, match="3 source pages do not fit 2"):
        extents((0, 1, 2), (0, 1), 0, 8, 4)
    topology = Topology.uniform((Shard(0, (0, 2), (0, 1)),), 4, 1)
    side, peer = SendingSide(0, topology, True), Peer("D0", 1, 0)
    side.peer_connected(peer, topology)
    side.open("r/0", "D0", 1, 12)
    actions = side.on_message(peer, Destinations("r/0", 12, (0, 1)))
    actions += side.start("r/0", (0, 1, 2)) + side.written("r/0", 0, 12, (0, 2))
    assert [(a.topic, a.good) for a in actions if isinstance(a, Observe)] == [("bootstrap", False), ("release", True)]
    assert not any(isinstance(action, Submit) for action in actions)


@pytest.mark.parametrize(("p", "d"), [(p, d) for p, d in product((1, 2, 3, 4, 8), repeat=2) if p != d])
def test_T10_unequal_pipelines_hold_source_pages_until_all_consumers_are_done(p: int, d: int) -> None:
    many = [request(f"r{i}", at=i * MS, prompt=3 + i * 2, cancel=(i % 3) * 7 * MS) for i in range(8)]
    stall = Fault(STALL, 0, "P0", 0, 200 * MS, 3)
    passes(case(*many, p=p, d=d, layers=8, faults=(stall,), prefill={"pages": 8}))


def test_T11_a_prompt_larger_than_the_receivers_pool_is_refused_at_once() -> None:
    result = passes(case(request(prompt=30, output=4), decode={"pages": 6}))
    assert "need 9 pages, the pool has 6" in result.outcomes["r0"]
    assert result.virtual < SECOND


def test_T11_two_prompts_that_do_not_fit_together_finish_one_after_the_other() -> None:
    both = (request("a", prompt=18, output=4), request("b", prompt=18, output=4))
    for side in ({"prefill": {"pages": 6}}, {"decode": {"pages": 6}}):
        result = passes(case(*both, **side))
        assert result.outcomes == {"a": "ok", "b": "ok"}


def test_D2_growth_over_the_pool_is_solved_by_retract() -> None:
    retracted = 0
    for seed in range(20):
        many = [request(f"r{i}", at=i * MS, prompt=3, output=24) for i in range(4)]
        world = World(case(*many, p=1, d=1 + seed % 3, seed=seed, decode={"pages": 8}))
        result = passes(world)
        assert all(outcome == "ok" for outcome in result.outcomes.values())
        decode = world.instances["D0"]
        assert decode is not None
        retracted += decode.ranks[0].core.replica.counters["retracted"]
    assert retracted > 0


def test_D3_retract_with_host_memory_full_ends_cleanly() -> None:
    for seed in range(20):
        many = [request(f"r{i}", at=i * MS, prompt=3, output=24) for i in range(4)]
        passes(case(*many, p=1, d=2, seed=seed, decode={"pages": 8, "host_pages": 0}))


@pytest.mark.parametrize("name", ["P0", "D0"])
def test_T6_restart_of_either_side_under_load(name: str) -> None:
    for at in range(2, 60, 4):
        many = [request(f"r{i}", at=i * 3 * MS, prompt=10, output=6) for i in range(6)]
        crash = Fault(CRASH, at * MS, name, 0, 100 * MS)
        result = passes(case(*many, faults=(crash,), seed=at))
        assert all(outcome == "ok" for outcome in result.outcomes.values()), (at, result.outcomes)
