"""Rows A1–A15 of the field scenarios, as far as they belong into the simulator."""

from __future__ import annotations

import msgspec
import pytest

from consensus.entry import Key
from consensus.recorder import Flight, Header
from pipeline import snapshot
from pipeline.local import Observation
from pipeline.replay import difference, replay
from pipeline.replica import Replica
from sim.case import (
    ADMIN,
    CUT,
    DRAIN,
    FAIL_QUIET,
    FREEZE,
    HOLD_RELAY,
    HOLD_REPORTS,
    MS,
    SECOND,
    SLOW,
    Delays,
    Fault,
    RequestPlan,
)
from sim.draw import draw
from sim.incarnation import Incarnation
from sim.rank import RankProcess
from sim.world import World, simulate
from tests.sim.clusters import STEADY, case, passes, request, watch

pytestmark = pytest.mark.sim


def instance(world: World, name: str) -> Incarnation:
    found = world.instances[name]
    assert found is not None
    return found


def seq_of(process: RankProcess, *note: object) -> int:
    """Seq of the entry in which the rank took this decision."""
    for record in process.core.recorder.records():
        if any(decision[: len(note)] == note for decision in record.notes):
            return record.entry.seq
    raise AssertionError(f"{process.name} never decided {note}")


def test_A2_abort_between_two_ranks_verdicts() -> None:
    world = World(case(request(), p=3, faults=(Fault(HOLD_RELAY, 1 * MS, "P0", 1, 300 * MS),)))
    at_cancel: list[int] = []

    def cancel_once_admitted(process: RankProcess) -> None:
        ready = process.core.replica.states["waiting"] or process.core.replica.states["running"]
        if process.rank == 0 and ready and not at_cancel:
            at_cancel.append(instance(world, "P0").ranks[1].core.cursor.applied)
            instance(world, "P0").cancel(Key("r0", 0), "client")

    watch(world, "P0", cancel_once_admitted)
    result = world.run()
    ranks = instance(world, "P0").ranks
    admitted = [seq_of(process, "move", "r0", 0, "bootstrapping", "waiting") for process in ranks]
    ended = [seq_of(process, "end", "r0", 0) for process in ranks]
    assert at_cancel[0] < admitted[0], "rank 1 had not applied the admission when the abort came"
    assert len(dict.fromkeys(admitted)) == len(dict.fromkeys(ended)) == 1 and admitted[0] < ended[0]
    assert "failed without an excuse" in result.violation, "the only complaint is that a fault-free attempt was aborted"


def test_A3_abort_during_the_handshake_then_silence() -> None:
    cut = Fault(CUT, 0, rank=0, value=0, length=30 * SECOND)
    result = passes(case(request(at=1 * MS, cancel=5 * MS), request("r1", at=2 * MS, cancel=50 * MS), faults=(cut,)))
    assert result.outcomes["r0"] == result.outcomes["r1"] == "cancelled"


def test_A4_handshakes_expire_while_the_decode_pool_is_full() -> None:
    """One request fills the pool for longer than the others may take: prefill waits for pages that never come."""
    long = request("long", prompt=13, output=3)
    others = [request(f"r{i}", at=(5 + i) * MS, prompt=8, output=2, timeout=(50 + 20 * i) * MS) for i in range(4)]
    late = request("late", at=2 * SECOND, prompt=8, output=2)
    for seed in range(10):
        full = {"pages": 4, "forward": (100 * MS,)}
        result = passes(case(long, *others, late, decode=full, seed=seed, retries=0))
        assert result.outcomes.pop("long") == result.outcomes.pop("late") == "ok"
        for name, outcome in result.outcomes.items():
            assert outcome.endswith(("timed out while granted", "timed out while bootstrapping")), (name, outcome)
        cells = result.coverage.cells
        assert cells["decode", "granted", "deadline"] or cells["prefill", "bootstrapping", "deadline"]


def test_A5_admission_takes_messages_and_never_a_forward() -> None:
    """PP8, forwards of one second each, all ranks busy: from the last rank's "ready" to admission on every rank."""
    requests = [request(f"r{i}", at=i * 700 * MS, prompt=8) for i in range(8)]
    slow = {"forward": (1 * SECOND,), "pages": 64}
    world = World(case(*requests, p=8, d=1, prefill=slow, decode={"pages": 64}, layers=8))
    ready: dict[str, int] = {}
    admitted: dict[str, int] = {}

    def notice(process: RankProcess, seen: Observation) -> None:
        if seen.topic == "bootstrap":
            ready[seen.room] = world.clock.now

    def look(process: RankProcess) -> None:
        if process.core.last:
            for req in process.core.replica.requests.values():
                if req.state != "bootstrapping":
                    admitted.setdefault(req.key.room, world.clock.now)

    world.observers.append(notice)
    watch(world, "P0", look)
    passes(world)
    assert len(admitted) == len(requests)
    slowest = max(admitted[room] - ready[room] for room in admitted)
    assert slowest < 5 * MS, f"{slowest} µs"


def test_A7_random_delay_on_every_asynchronous_completion() -> None:
    slow = Delays(ring=(5, 5 * MS), link=(10, 50 * MS), engine=(10, 100 * MS), loop=(0, 2 * MS), straggler=0.05)
    for seed in range(25):
        many = [request(f"r{i}", at=i * 3 * MS, prompt=1 + i * 3, output=1 + i) for i in range(8)]
        passes(case(*many, p=1 + seed % 4, d=1 + seed // 2 % 4, seed=seed, delays=slow))


@pytest.mark.parametrize("timeout", [3, 10, 20, 40, 60])
def test_A8_deadlines_expire_in_every_queue_and_slot(timeout: int) -> None:
    many = [request(f"r{i}", at=i * MS, prompt=6, output=40, timeout=timeout * MS) for i in range(8)]
    world = World(case(*many, decode={"pages": 40}, p=3, d=3))
    result = passes(world)
    assert any("timed out while" in outcome for outcome in result.outcomes.values())
    for name in ("P0", "D0"):
        ranks = instance(world, name).ranks
        ends = [[seq_of(rank, "end", f"r{i}", 0) for i in range(8)] for rank in ranks if _ended_all(rank)]
        assert all(seqs == ends[0] for seqs in ends)


def _ended_all(rank: RankProcess) -> bool:
    noted = [note for record in rank.core.recorder.records() for note in record.notes]
    return all(any(note[:2] == ("end", f"r{i}") for note in noted) for i in range(8))


def test_A9_only_the_exact_id_ends() -> None:
    world = World(case(request("a10", output=20), request("b", at=1 * MS)))
    for name in ("P0", "D0"):
        sequencer = instance(world, name).ranks[0].sequencer
        assert sequencer is not None
        for time, key in enumerate([("a1", 0), ("a100", 0), ("a10", 1), ("", 0), ("b", 7)]):
            world.clock.at(5 * MS + time, sequencer.cancel, Key(*key), "client")
        world.clock.at(5 * SECOND, sequencer.cancel, Key("a10", 0), "client")  # finished by then
    result = passes(world)
    assert result.outcomes == {"a10": "ok", "b": "ok"}


@pytest.mark.parametrize("capacity", [0, 1])
def test_A10_no_deadlock_without_buffers(capacity: int) -> None:
    for seed in range(12):
        many = [request(f"r{i}", at=i * 500, prompt=4 + i, output=8) for i in range(10)]
        plan = case(*many, p=2 + seed % 7, d=2 + seed % 5, seed=seed, capacity=capacity, layers=8)
        world = World(plan)
        passes(world)
        waited = max(channel.most_waiting for channel in instance(world, "D0").channels)
        assert waited > 0, "the outboxes were never needed"


def busy() -> list[RequestPlan]:
    return [request(f"r{i}", at=i * 2 * MS, prompt=3 + 2 * i, output=4 + i % 5) for i in range(12)]


def test_A11_status_and_dumps_while_busy_change_nothing() -> None:
    asked = tuple(Fault(ADMIN, 0, name, 0, 80 * MS, 60) for name in ("P0", "D0"))
    worlds = [World(case(*busy(), p=3, d=2, faults=faults)) for faults in ((), asked)]
    quiet, inspected = (passes(world) for world in worlds)
    assert inspected.coverage.faults[ADMIN] == 2
    assert {name: inspected.outcomes[name] for name in quiet.outcomes} == quiet.outcomes
    for name in ("P0", "D0"):
        # Up to the heartbeats at the end, the same entries with the same decisions.
        plain, asked_for = (instance(world, name).ranks[-1].core.recorder.records() for world in worlds)
        decided = [record for record in plain if record.notes]
        assert [record for record in asked_for if record.notes][: len(decided)] == decided


@pytest.mark.parametrize("name", ["P0", "D0"])
@pytest.mark.parametrize("patience", [0, 1 * SECOND])
def test_A11_an_instance_that_is_drained_while_busy_loses_nobody(name: str, patience: int) -> None:
    for at in (1, 10, 25, 40):
        drain = Fault(DRAIN, at * MS, name, 0, 50 * MS, patience)
        world = World(case(*busy(), p=2, d=2, faults=(drain,)))
        assert set(passes(world).outcomes.values()) == {"ok"}
        reasons = [
            attempt.merge.finish.reason
            for client in world.gateway.clients.values()
            for attempt in client.attempts
            if attempt.merge.finish is not None and attempt.merge.finish.reason
        ]
        # With patience, only those that came later were sent away, and none of them had begun.
        assert not patience or all(reason.endswith(f"{name} is gone") for reason in reasons)


@pytest.mark.parametrize(("name", "rank"), [("P0", 0), ("P0", 2), ("D0", 0), ("D0", 1)])
def test_A12_a_rank_that_stands_still_delays_its_instance_or_ends_it(name: str, rank: int) -> None:
    for at in (2, 15, 30):
        for length, epoch in ((3 * SECOND, 1), (9 * SECOND, 2)):
            freeze = Fault(FREEZE, at * MS, name, rank, length)
            world = World(case(*busy(), p=3, d=2, faults=(freeze,)))
            assert set(passes(world).outcomes.values()) == {"ok"}
            assert instance(world, name).epoch == epoch, "its daemon waits for eight seconds"


@pytest.mark.parametrize(("faulty", "stops"), [(0, 1), (1, 1), (2, 2)])
@pytest.mark.parametrize("name", ["P0", "D0"])
def test_A13_a_rank_with_a_wrong_allocator_is_stopped_at_that_entry(
    name: str, faulty: int, stops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Incarnation, "after_apply", lambda self, process: None)  # the core's own check is meant
    world = World(case(*(request(f"r{i}", at=i * 5 * MS) for i in range(4)), p=3, d=3))
    ranks = instance(world, name).ranks
    pool = ranks[faulty].core.replica.leases.pool
    take, calls = pool.take, iter(range(100))
    monkeypatch.setattr(pool, "take", lambda count: take(count)[:: -1 if next(calls) == 1 else 1])
    result = world.run()
    assert result.violation.startswith("Diverged: state differs after seq")
    flights = [Flight(Header(name, name, 1, process.rank, b""), process.core.recorder.records()) for process in ranks]
    found = difference(flights[stops - 1], flights[stops])
    assert found is not None and f"after seq {found.entry.seq}:" in result.violation
    assert ranks[stops].core.cursor.applied == found.entry.seq, "the entry after it was refused"
    field, request_id = (found.left or ())[:2]
    assert (field, request_id) == ("pages", "r1") and "'pages', 'r1'" in str(found)
    if name == "P0":
        assert f"tick {found.entry.launch.tick}" in str(found)
    replica = type(ranks[faulty].core.replica)(ranks[faulty].core.replica.config)
    state = msgspec.msgpack.encode(snapshot.take(replica))
    steps = [
        list(replay(Flight(Header(name, name, 1, rank, state), flights[rank].records), type(replica)))
        for rank in range(3)
    ]
    wrong = [next((s.record.entry.seq for s in mine if not s.same), 0) for mine in steps]
    assert wrong == [found.entry.seq if rank == faulty else 0 for rank in range(3)], "the log says who was wrong"


def test_A13_a_recorded_log_reproduces_every_decision() -> None:
    world = World(draw(11, "aborts"))
    passes(world)
    for found in world.instances.values():
        assert found is not None
        for process in found.ranks:
            replica: Replica = type(process.core.replica)(process.core.replica.config)
            for record in process.core.recorder.records():
                replica.apply(record.entry)
                if record.entry.launch is not None:
                    replica.launch(record.entry.launch)
                replica.fold()
                assert replica.digest.value == record.digest


def test_A14_store_flooded_while_a_reporter_is_cut_off() -> None:
    many = [request(f"r{i}", at=i * MS, prompt=4, output=2, cancel=(i % 3) * 20 * MS) for i in range(60)]
    cut = Fault(HOLD_REPORTS, 5 * MS, "P0", 1, 10 * SECOND)
    world = World(case(*many, p=3, faults=(cut,)))
    most: list[int] = [0]

    def look(process: RankProcess) -> None:
        if process.sequencer is not None:
            most[0] = max(most[0], len(process.sequencer.store))

    watch(world, "P0", look)
    result = passes(world)
    assert 0 < most[0] <= 60, "at most as many rooms as were open"
    assert all(outcome in ("ok", "cancelled") for outcome in result.outcomes.values())


@pytest.mark.parametrize("per_frame", [1 * MS, 20 * MS])
def test_A14_store_flooded_while_rank_0_is_slow(per_frame: int) -> None:
    many = [request(f"r{i}", at=i * MS // 2, prompt=4, output=2, cancel=(i % 2) * (5 + i) * MS) for i in range(120)]
    world = World(case(*many, p=3, faults=(Fault(SLOW, 5 * MS, "P0", 0, 10 * SECOND, per_frame),)))
    rooms: list[int] = []

    def look(process: RankProcess) -> None:
        if process.sequencer is not None:
            rooms.append(len(process.sequencer.store))

    watch(world, "P0", look)
    result = passes(world)  # which also checks that what waits on the ring stays within the window
    assert all(outcome in ("ok", "cancelled") for outcome in result.outcomes.values())
    # A rank says at most six things of an attempt: its bootstrap, a bell or two for each of two stages, the end.
    waited = [process.reports.most_unread for process in instance(world, "P0").ranks[1:]]
    assert 10 < max(waited) <= 6 * len(many) and max(rooms) <= len(many)
    assert result.virtual < 20 * SECOND, "the stall ends with its cause"


def test_A15_nothing_is_inherited_by_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.gateway.BACKOFF", 1 * MS)
    for seed in range(10):
        faults = (Fault(FAIL_QUIET, 0, "P0", 1, value=1), Fault(HOLD_REPORTS, 1 * MS, "P0", 1, 200 * MS))
        world = World(case(request(), p=3, d=2, seed=seed, faults=faults, delays=STEADY))
        result = passes(world)
        assert result.outcomes["r0"] == "ok"
        assert len(world.gateway.clients["r0"].attempts) == 2


def test_G9_a_request_submitted_twice_runs_once() -> None:
    world = World(case(*(request(f"r{i}", at=i * MS, twice=True) for i in range(6))))
    passes(world)
    rank = instance(world, "P0").ranks[0]
    opened = [note for record in rank.core.recorder.records() for note in record.notes if note[0] == "open"]
    assert len(opened) == 6


def test_aborts_of_half_of_all_requests_at_random_moments() -> None:  # A1, in small
    for seed in range(100, 130):
        result = simulate(draw(seed, "aborts"))
        assert not result.violation, (seed, result.violation)
