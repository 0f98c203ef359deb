"""The whole replicated state as plain data, so that a recording can start in the middle of a run.

In: a replica between two entries. Out: a `Snapshot`; `restore` makes an equal replica of it, one that
answers the same entries with the same decisions and digests. Every order that matters is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from consensus.entry import Key, RequestSpec
from pipeline.lease import Holder, Lease
from pipeline.outcome import Outcome
from pipeline.planner import Batch
from pipeline.replica import Replica, ReplicaConfig, RoleState
from pipeline.request import Request


class RequestState(msgspec.Struct, frozen=True, array_like=True):
    """`pipeline.request.Request`, field by field."""

    spec: RequestSpec
    state: str
    stage_seq: int
    deadline: int
    stage_deadline: int
    computed: int
    number: int
    ticks: list[int]
    output: list[int]
    ending: Outcome | None


class Snapshot(msgspec.Struct, frozen=True):
    """State after entry `seq`."""

    config: ReplicaConfig
    seq: int
    clock: int
    digest: bytes
    requests: list[RequestState]  # in the order the log opened them
    states: dict[str, list[Key]]  # each in the order of arrival in that state
    rooms: list[Key]
    free_runs: list[tuple[int, int]]
    leases: list[tuple[Key, tuple[int, ...], list[Holder]]]
    free_slots: list[int]
    flight: list[Batch]
    next_tick: int
    since: int
    opened: int
    role: RoleState  # what the role keeps besides


def take(replica: Replica) -> Snapshot:
    """The state between two entries."""
    assert not replica.moved, "a snapshot is taken between entries"
    requests = [
        RequestState(
            r.spec,
            r.state,
            r.stage_seq,
            r.deadline,
            r.stage_deadline,
            r.computed,
            r.number,
            list(r.ticks),
            list(r.output),
            r.ending,
        )
        for r in replica.requests.values()
    ]
    return Snapshot(
        config=replica.config,
        seq=replica.seq,
        clock=replica.clock,
        digest=replica.digest.value,
        requests=requests,
        states={state: list(members) for state, members in replica.states.items()},
        rooms=list(replica.rooms.values()),
        free_runs=list(replica.leases.pool.runs),
        leases=[(key, lease.pages, list(lease.holders)) for key, lease in replica.leases.items()],
        free_slots=list(replica.slots.free_slots),
        flight=list(replica.slots.flight),
        next_tick=replica.slots.next_tick,
        since=replica.slots.since,
        opened=replica.opened,
        role=replica.role_state(),
    )


def restore(snapshot: Snapshot, make: Callable[[ReplicaConfig], Replica]) -> Replica:
    """An equal replica; `make` is the role's class."""
    replica = make(snapshot.config)
    replica.seq, replica.clock = snapshot.seq, snapshot.clock
    replica.digest.value = snapshot.digest
    for saved in snapshot.requests:
        most = snapshot.config.max_model_len
        request = Request(saved.spec, saved.state, 0, saved.stage_seq, saved.number, most)
        request.deadline, request.stage_deadline = saved.deadline, saved.stage_deadline
        request.computed, request.ending = saved.computed, saved.ending
        request.ticks, request.output = list(saved.ticks), list(saved.output)
        replica.requests[request.key] = request
    for state, keys in snapshot.states.items():
        replica.states[state] = {key: replica.requests[key] for key in keys}
    replica.attempts = {key.room: key for key in replica.requests}
    replica.rooms = {key.room: key for key in snapshot.rooms}
    replica.leases.restore(snapshot.free_runs, {key: Lease(pages, tuple(h)) for key, pages, h in snapshot.leases})
    slots = replica.slots
    slots.free_slots, slots.flight, slots.next_tick = (
        list(snapshot.free_slots),
        deque(snapshot.flight),
        snapshot.next_tick,
    )
    slots.since = snapshot.since
    replica.opened = snapshot.opened
    replica.restore_role(snapshot.role)
    return replica
