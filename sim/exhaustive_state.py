"""Freezing a small world, and telling which two worlds have the same future.

`freeze` and `thaw` copy everything mutable. `fingerprint` keeps what decides the future and drops what is only
history: digest values, clocks of entries, and the absolute numbers of entries and ticks, of which the core uses
the order alone (so they are renumbered, and two schedules that differ in how many entries they took can meet).
Dropping digests is sound because every step compares them: in a world that got here they are equal, and chaining
keeps them equal exactly as long as the next decisions are. The followers' replicas are dropped for the same
reason, but only after `agree` has compared them with rank 0's in full, beyond what a digest covers.

A field that a later change adds to the core must not be overlooked: `_KNOWN` names what was considered, and a
class with other fields is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Final

import msgspec

from consensus.entry import Abort, Admission, Ballot, Key, RequestSpec, Return, StageKey, Verdict
from consensus.log import Cursor, Window
from consensus.store import Leader, Reporter, Update
from consensus.votes import BallotBox, Bell
from pipeline import snapshot
from pipeline.effects import Acknowledge, CopyFromHost, CopyToHost
from pipeline.local import Local, Observation
from pipeline.outcome import Outcome
from pipeline.planner import Batch
from pipeline.rank import RankCore
from pipeline.replica import ReplicaConfig
from pipeline.sequencer import Sequencer
from pipeline.snapshot import RequestState, Snapshot
from sim.exhaustive_ports import Port
from sim.exhaustive_world import Bounds, Violation, World

_KNOWN: Final = {
    RankCore: "cursor last local rank recorder replica stale store",
    Cursor: "applied epoch",
    Window: "_unacked limit",
    Local: "_due _rung _seen _voted rank",
    Reporter: "_map _number rank",
    Leader: "_numbers _ranks _rooms",
    BallotBox: "_ranks _topics",
    Sequencer: "_aborts _admissions _last_written _next_deadline _progress _requests _returns _verdicts"
    " alone box core dropped store window",
    RequestState: "computed deadline ending number output spec stage_deadline stage_seq state ticks",
    Snapshot: "clock config digest flight free_runs free_slots leases next_tick opened requests role rooms seq since"
    " states",
}  # fmt: skip


def check_known(world: World) -> None:
    """Raises if the core has grown a field that nobody has thought about here."""
    core, sequencer = world.cores[0], world.sequencer
    found: dict[type, Iterable[str]] = {
        type(item): vars(item)
        for item in (
            core,
            core.cursor,
            core.local,
            core.store,
            sequencer,
            sequencer.window,
            sequencer.store,
            sequencer.box,
        )
    }
    found |= {kind: kind.__struct_fields__ for kind in (RequestState, Snapshot)}
    for kind, fields in found.items():
        unknown = sorted(set(fields) - set(_KNOWN[kind].split()))
        assert not unknown, (
            f"sim.exhaustive_state does not know {kind.__name__}.{unknown}: part of the state or history?"
        )


# -- copies ----------------------------------------------------------------------------------------------


_VALUES: list[Any] = []  # immutable values met so far; a frozen world names them by their place here
_PLACES: dict[Any, int] = {}


def _value(place: int) -> Any:
    return _VALUES[place]


def _name(value: Any) -> tuple[Any, ...]:
    place = _PLACES.get(value)
    if place is None:
        place = _PLACES[value] = len(_VALUES)
        _VALUES.append(value)
    return _value, (place,)


class _Pickler(pickle.Pickler):
    """Shares what cannot change. Codecs are stateless and refuse to be pickled: a new one is as good."""

    dispatch_table = {
        **dict.fromkeys(
            (Abort, Acknowledge, Admission, Ballot, Batch, Bell, Bounds, CopyFromHost, CopyToHost, Key, Observation),
            _name,
        ),
        **dict.fromkeys((Outcome, ReplicaConfig, RequestSpec, Return, Update, Verdict), _name),
        msgspec.msgpack.Encoder: lambda encoder: (msgspec.msgpack.Encoder, ()),
        msgspec.msgpack.Decoder: lambda decoder: (msgspec.msgpack.Decoder, (decoder.type,)),
    }


def freeze(world: World) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(world)
    return buffer.getvalue()


def thaw(frozen: bytes) -> World:
    world: World = pickle.loads(frozen)  # noqa: S301 - our own bytes of a moment ago
    return world


# -- what decides the future -----------------------------------------------------------------------------


class _Writer:
    """A flat list of plain values. Entry numbers are collected apart and replaced by their rank at the end."""

    def __init__(self) -> None:
        self.out: list[Any] = []
        self._spots: list[int] = []

    def add(self, *values: Any) -> None:
        self.out += values

    def seq(self, seq: int) -> None:
        self._spots.append(len(self.out))
        self.out.append(seq)

    def stage(self, stage: StageKey) -> None:
        self.out.append(stage.key.room)
        self.seq(stage.stage_seq)

    def digest(self) -> bytes:
        places = {seq: place for place, seq in enumerate(sorted({0, *(self.out[spot] for spot in self._spots)}))}
        for spot in self._spots:
            self.out[spot] = places[self.out[spot]]
        return blake2b(msgspec.msgpack.encode(self.out), digest_size=16).digest()


def fingerprint(world: World) -> bytes:
    """Equal for two worlds only if the same actions lead to the same checks from both. Needs a world without lag."""
    assert not any(world.relay), "entries under way are not part of the fingerprint"
    write = _Writer()
    _replica(write, agree(world))
    for core in world.cores:
        _local(write, core)
    _sequencer(write, world)
    _environment(write, world)
    return write.digest()


def agree(world: World) -> Snapshot:
    """Rank 0's replicated state, which is everybody's."""
    first = snapshot.take(world.cores[0].replica)
    for core in world.cores[1:]:
        if snapshot.take(core.replica) != first:
            raise Violation(
                f"rank {core.rank} has another state than rank 0 after seq {first.seq}, unseen by the digest"
            )
    return first


def _replica(write: _Writer, state: Snapshot) -> None:
    for request in state.requests:
        write.add(request.spec.key.room, request.state, request.deadline, request.stage_deadline, request.computed)
        write.add(request.number, request.output, request.ending and request.ending.kind)
        write.add([tick - state.next_tick for tick in request.ticks])
        write.seq(request.stage_seq)
    write.add({name: [key.room for key in keys] for name, keys in state.states.items() if keys})
    write.add(
        [key.room for key in state.rooms], state.free_runs, state.free_slots, state.clock, state.since, state.opened
    )
    for key, pages, holders in state.leases:
        write.add(key.room, pages, len(holders))
        for holder in holders:
            write.add(holder[0])
            if holder[0] == "tick":
                write.add(int(holder[1]) - state.next_tick)
            elif holder[0] == "copy":
                write.seq(int(holder[1]))
            else:
                assert len(holder) == 1
    write.add([_batch(batch, state.next_tick) for batch in state.flight])
    write.add([key.room for key in state.role.turn], [key.room for key in state.role.needy], state.role.share)


def _batch(batch: Batch, next_tick: int) -> list[Any]:
    rows = [(row.key.room, row.start, row.tokens, row.pages, row.sample is not None) for row in batch.rows]
    return [batch.tick - next_tick, batch.slot, rows]


def _local(write: _Writer, core: RankCore) -> None:
    local = core.local
    for room, topics in sorted(local._seen.items()):
        for topic, seen in sorted(topics.items()):
            write.add(room, topic, seen.good, len(seen.payload))
            write.seq(seen.stage_seq)
    write.add("rung")
    for room, rung in sorted(local._rung.items()):
        for topic, seq in sorted(rung.items()):
            write.add(room, topic)
            write.seq(seq)
    write.add("voted")
    for room, voted in sorted(local._voted.items()):
        for topic, seq in sorted(voted.items()):
            write.add(room, topic)
            write.seq(seq)
    write.add(sorted((room, int(status)) for room, status in core.store._map.items()), core.store._number > 0)


def _sequencer(write: _Writer, world: World) -> None:
    sequencer = world.sequencer
    store, window = sequencer.store, sequencer.window
    for room, record in sorted(store._rooms.items()):
        views = [None if view is None else int(view) for view in record.views]
        write.add(room, views, record.deleted, int(record.concluded))
    # Updates come in order and none is lost, so only a hole would tell their numbers apart: there must be none.
    for core, number in zip(world.cores, store._numbers, strict=True):
        waiting = sum(isinstance(item, Update) for item in world.reports[core.rank])
        write.add(core.store._number - number - waiting)
    for topic, book in sequencer.box._topics.items():
        # `settled` is always before the entry to come, so it never holds a ballot back at this point.
        write.add(topic, book.dirty)
        write.seq(book.outstanding)
        for stage, ranks in book.bells.values():
            write.stage(stage)
            write.add(sorted(ranks))
    write.add("window", sequencer._last_written, sequencer._next_deadline)
    for seq, _ in window._unacked:
        write.seq(seq)
    write.add("queues", [spec.key.room for spec in sequencer._requests])
    for item in (*sequencer._aborts, *sequencer._admissions, *sequencer._verdicts, *sequencer._returns):
        _item(write, item, world.cores[0].replica.slots.next_tick)


def _environment(write: _Writer, world: World) -> None:
    next_tick = world.cores[0].replica.slots.next_tick
    for k in range(world.bounds.ranks):
        write.add("ports")
        for room, port in sorted(world.ports[k].items()):
            write.add(room, *(getattr(port, name) for name in Port.__slots__))
        for room, copy in sorted(world.copies[k].items()):
            write.add(room, isinstance(copy, CopyToHost), copy.pages)
            write.seq(copy.stage_seq)
        write.add("reports", list(world.drops[k]))
        for item in world.reports[k]:
            _item(write, item, next_tick)
    write.add("back")
    for answer in world.back:
        _item(write, answer, next_tick)
    write.add([_batch(batch, next_tick) for batch in world.flight], len(world.launched))
    write.add(sorted((key.room, outcome.kind) for key, outcome in world.ends.items()))
    write.add([key.room for key in world.aborts], world.times, world.clock)


def _item(write: _Writer, item: Any, next_tick: int) -> None:
    match item:
        case Abort() | Admission():
            write.add(item.key.room, item.kind if isinstance(item, Abort) else item.ok)
        case Return():
            write.add(item.tick - next_tick, len(item.tokens))
        case Verdict():
            write.add("verdict", item.topic)
            write.seq(item.ballot_seq)
            _stages(write, [stage for stage, _ in item.good], [stage for stage, _ in item.bad])
        case Acknowledge():
            write.add("ack", len(item.ballots))
            write.seq(item.seq)
            for ballot in item.ballots:
                _item(write, ballot, next_tick)
        case Ballot():
            write.add("ballot", item.topic)
            _stages(write, list(item.good), [stage for stage, _ in item.bad])
        case Bell():
            write.add("bell", item.rank, item.topic, item.good)
            write.stage(item.key)
        case Update():
            write.add("update", item.rank, item.room, None if item.status is None else int(item.status))
        case _:
            raise AssertionError(f"{item} is not part of the fingerprint")


def _stages(write: _Writer, good: list[StageKey], bad: list[StageKey]) -> None:
    write.add(len(good), len(bad))
    for stage in (*good, *bad):
        write.stage(stage)
