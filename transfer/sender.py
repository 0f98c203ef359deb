"""All rooms of one prefill rank.

In: what the log decided (`open`, `start`, `stop`, `close`), what the executor wrote,
what peers said, which handles ended. Out: actions; the shell only carries them out.

Invariants: what a peer says of a room the log has not opened is parked, or leaves a
tombstone that fails the room when it opens; `Stop` of an ended or unknown room is
answered with `Stopped`, since nothing is in flight and the tombstone keeps it so; a
room with a handle in flight or of unknown fate is never forgotten, closed or not;
nothing happens to a room for what is said with another token than its own.

A handle belongs to the engine that got it. Engines are counted: `retire_engine` ends
the giving to one, `engine_replaced` says that it is destroyed (its handles read nothing
any more: pages are released), `tail_passed` that nothing of it can land at a peer any
more (only then `Stopped`). Each replacement has its own tail, so that a second one
before the first one's tail has passed fences only what is its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from .actions import Observe, Peer, Send, SenderAction, Submit
from .messages import Again, Destinations, Failed, Finished, FinishedAck, RoomMessage, Slice, Stop, Stopped
from .plan import Topology, TransferPlan
from .sending_room import Sending, SendingRoom
from .tombstones import Remembered


@dataclass(slots=True)
class SenderCounters:
    opened: int = 0
    done: int = 0
    failed: int = 0
    foreign: int = 0  # a message about a room of another incarnation
    unauthorized: int = 0  # a message with another token than its room's
    unexpected: int = 0  # a message that a decode rank never sends
    again: int = 0  # slices that arrived damaged, says the peer
    stray: int = 0  # a completion nobody waits for


@dataclass(frozen=True, slots=True)
class SendingStatus:
    room: str
    state: str
    reason: str
    in_flight: int
    unproven: int  # handles that ended badly: our pages and theirs may still be used by them
    trailing: int  # handles of a destroyed engine: what the kernel took of them may still land in their pages


@dataclass(slots=True)
class _Handle:
    room: SendingRoom
    peer_rank: int
    engine: int


class SendingSide:
    def __init__(
        self,
        rank: int,
        topology: Topology,
        sampler: bool,
        checksums: bool = False,
        parked_rooms: int = 1024,
        parked_pages: int = 1 << 22,
        remembered: int = 65536,
    ) -> None:
        assert sampler == (rank == len(topology.shards) - 1), "the sampler is the last rank"
        self.rank, self.topology, self._checksums = rank, topology, checksums
        self.counters = SenderCounters()
        self._rooms: dict[str, SendingRoom] = {}
        self._plans: dict[str, dict[int, TransferPlan]] = {}  # instance -> epoch; epochs that are connected
        self._lost: Remembered[str] = Remembered(remembered)  # "instance#epoch" -> reason
        self._over: Remembered[str] = Remembered(remembered)  # room -> reason
        self._stopped: Remembered[str] = Remembered(remembered)  # room and token of a Stop that came early -> reason
        self._parked_rooms, self._parked_pages = parked_rooms, parked_pages
        self._parked: Remembered[dict[Peer, Destinations]] = Remembered(parked_rooms)
        self._handles: dict[int, _Handle] = {}
        self._engine = 1  # the one that gets what is submitted now
        self._numbers = itertools.count(1)

    # ---- peers

    def peer_connected(self, peer: Peer, topology: Topology) -> list[SenderAction]:
        """Its Hello was accepted; also each time it dials anew. Raises `PlanError` if we do not fit."""
        plan = TransferPlan(self.topology, topology)
        actions: list[SenderAction] = []
        # First, so that rooms that take whichever incarnation comes do not end with the older one.
        self._plans.setdefault(peer.instance, {}).setdefault(peer.epoch, plan)
        for epoch in list(self._plans[peer.instance]):
            if epoch < peer.epoch:
                reason = f"{peer.instance} restarted as epoch {peer.epoch}"
                actions += self.peer_lost(peer.instance, epoch, reason, dead=True)
        self._lost.pop(f"{peer.instance}#{peer.epoch}")
        for room in self._rooms.values():
            if room.plan is not None and room.fits(peer.instance, peer.epoch):
                actions += room.repeat(peer)
        return actions

    def known_topology(self, instance: str, epoch: int) -> Topology | None:
        """What other ranks of this incarnation said: all must say the same."""
        plan = self._plans.get(instance, {}).get(epoch)
        return None if plan is None else plan.destination

    def peer_lost(self, instance: str, epoch: int, reason: str, dead: bool) -> list[SenderAction]:
        """No rank of this incarnation can be counted on. Its rooms fail; their handles go on to their ends.

        `dead`: it will not come back, so rooms opened against it later fail at once. Silence ends the rooms
        that wait for it, and is not held against the next one: a link may heal.
        """
        if dead:
            self._lost.put(f"{instance}#{epoch}", reason)
        self._unpark(instance, epoch)
        plans = self._plans.get(instance, {})
        plans.pop(epoch, None)
        if not plans:
            self._plans.pop(instance, None)
        replaced = any(other > epoch for other in plans)
        actions: list[SenderAction] = []
        for room in list(self._rooms.values()):
            if room.fits(instance, epoch) and not (room.epoch == 0 and replaced):
                actions += self._ending(room, room.fail(reason))
        return actions

    def awaited(self) -> tuple[tuple[str, int], ...]:
        """(instance, epoch) that open rooms wait for; epoch 0: any. The shell watches over their silence."""
        return tuple(dict.fromkeys((room.instance, room.epoch) for room in self._rooms.values() if not room.ended))

    def on_message(self, peer: Peer, message: RoomMessage) -> list[SenderAction]:
        match message:
            case Destinations():
                return self._on_destinations(peer, message)
            case Stop():
                return self._on_stop(peer, message)
            case FinishedAck():
                room = self._rooms.get(message.room)
                if room is None or not room.fits(peer.instance, peer.epoch):
                    return []
                return self._ending(room, room.acked(peer))
            case Again():
                return self._on_again(peer, message)
            case Slice() | Finished() | Failed() | Stopped():
                self.counters.unexpected += 1
                return []
            case _:
                assert_never(message)

    # ---- the log

    def open(self, room: str, instance: str, epoch: int, prompt_len: int, token: bytes = b"") -> list[SenderAction]:
        """`token` is what the target side must show."""
        assert room not in self._rooms and prompt_len > 0, f"{room} of {prompt_len} positions"
        layers = self.topology.shards[self.rank].layers
        page_size = self.topology.page_size
        record = SendingRoom(
            room, instance, epoch, prompt_len, layers, page_size, self._checksums, self._allocate, token
        )
        self._rooms[room] = record
        self.counters.opened += 1
        parked = self._parked.pop(room) or {}
        over = self._over.get(room) or self._stopped.get(_early(room, token)) or self._lost.get(f"{instance}#{epoch}")
        if over is not None:
            return self._ending(record, record.fail(over))
        actions: list[SenderAction] = []
        for peer, message in parked.items():
            actions += self._on_destinations(peer, message)
        return actions

    def start(self, room: str, pages: Sequence[int]) -> list[SenderAction]:
        """Our pages for the prompt, in order of position."""
        record = self._rooms.get(room)
        return [] if record is None else self._ending(record, record.start(pages))

    def written(self, room: str, start: int, end: int, layers: tuple[int, int]) -> list[SenderAction]:
        """KV of these positions for these layers is in the pool. Per layer in order; repeats are harmless.

        Of a room that is gone (a tick still queued when it was closed) this does nothing."""
        record = self._rooms.get(room)
        return [] if record is None else self._ending(record, record.written(start, end, layers))

    def first_token(self, room: str, payload: bytes) -> list[SenderAction]:
        record = self._rooms.get(room)
        return [] if record is None else self._ending(record, record.first_token(payload))

    def stop(self, room: str, reason: str) -> list[SenderAction]:
        record = self._rooms.get(room)
        return [] if record is None else self._ending(record, record.stop(reason))

    def close(self, room: str) -> list[SenderAction]:
        """The log ended the request. What is still in flight is kept until it has ended."""
        record = self._rooms.get(room)
        if record is None:
            return []
        actions = record.fail("closed", tell=False)
        record.closed = True
        self._over.put(room, record.reason or "ended")
        return [action for action in self._ending(record, actions) if not isinstance(action, Observe)]

    # ---- the engine

    def completed(
        self, handle: int, error: str | None, quiet: bool = False, checksums: bytes = b""
    ) -> list[SenderAction]:
        """`quiet`: although it failed, the handle provably writes nothing any more (nothing was ever started).

        `checksums`: of what it wrote, where the action asked for them."""
        if handle not in self._handles:
            self.counters.stray += 1
            return []
        record = self._handles[handle]
        proven = error is None or quiet
        if proven:
            del self._handles[handle]
        return self._ending(record.room, record.room.completed(record.peer_rank, handle, error, proven, checksums))

    def knows(self, handle: int) -> bool:
        """Whether its end still means something."""
        return handle in self._handles

    def wanted(self, handle: int) -> bool:
        """Whether a handle that no engine has yet is worth giving to one."""
        return handle in self._handles and not self._handles[handle].room.ended

    def retire_engine(self, held: Iterable[int] = ()) -> int:
        """The engine gets no more handles; these, which it never got, are for its successor. Returns its number."""
        retired = self._engine
        self._engine += 1
        for handle in held:
            self._handles[handle].engine = self._engine
        return retired

    def engine_replaced(self, engine: int) -> list[SenderAction]:
        """That engine is destroyed, and all its handles with it, whatever was known of them."""
        assert engine < self._engine, f"engine {engine} still gets handles"
        actions: list[SenderAction] = []
        for handle, record in list(self._handles.items()):
            if record.engine <= engine:
                del self._handles[handle]
                ended = record.room.engine_replaced(record.peer_rank, handle, engine)
                actions += self._ending(record.room, ended)
        return actions

    def trailing_peers(self, engine: int) -> tuple[Peer, ...]:
        """In whose pages something of that destroyed engine may still land."""
        flows = [flow for room in self._rooms.values() for flow in room.flows.values()]
        return tuple(dict.fromkeys(flow.peer for flow in flows if engine in flow.trailing.values()))

    def tail_passed(self, engine: int, peer: Peer) -> list[SenderAction]:
        """Nothing of that destroyed engine can land at this peer any more: its fence."""
        actions: list[SenderAction] = []
        for room in list(self._rooms.values()):
            actions += self._ending(room, room.tail_passed(peer, engine))
        return actions

    # ---- status

    def rooms(self) -> tuple[SendingStatus, ...]:
        return tuple(
            SendingStatus(room.room, room.state.value, room.reason, room.pending, room.unproven, room.trailing)
            for room in self._rooms.values()
        )

    def in_flight(self) -> int:
        return sum(room.pending for room in self._rooms.values())

    def unproven(self) -> int:
        return sum(room.unproven for room in self._rooms.values())

    def trailing(self) -> int:
        return sum(room.trailing for room in self._rooms.values())

    # ---- inside

    def _allocate(self, room: SendingRoom, peer_rank: int) -> int:
        handle = next(self._numbers)
        self._handles[handle] = _Handle(room, peer_rank, self._engine)
        return handle

    def _on_destinations(self, peer: Peer, message: Destinations) -> list[SenderAction]:
        room = self._rooms.get(message.room)
        if room is None:
            over = self._over.get(message.room) or self._stopped.get(_early(message.room, message.token))
            if over is not None:
                return [Send(peer, Failed(message.room, over[:1000])), Send(peer, Stopped(message.room))]
            return self._park(peer, message)
        if not room.opened_by(message.token):
            self.counters.unauthorized += 1
            if peer.rank in room.flows and room.fits(peer.instance, peer.epoch):
                return []  # it has shown the right one before; who says this is somebody else
            reason = "the room was opened with another token"
            return [Send(peer, Failed(message.room, reason)), Send(peer, Stopped(message.room))]
        plan = self._plans.get(peer.instance, {}).get(peer.epoch)
        if not room.fits(peer.instance, peer.epoch) or plan is None:
            self.counters.foreign += 1
            reason = f"the room is for {room.instance} epoch {room.epoch}"
            return [Send(peer, Failed(message.room, reason)), Send(peer, Stopped(message.room))]
        return self._ending(room, room.destinations(peer, message, plan, self.rank))

    def _park(self, peer: Peer, message: Destinations) -> list[SenderAction]:
        """Our log has not opened the room yet. Too much of this, and the room is refused rather than forgotten."""
        waiting = self._parked.get(message.room) or {}
        pages = sum(len(early.pages) for rooms in self._parked.values() for early in rooms.values())
        full = len(self._parked) >= self._parked_rooms and not waiting
        if full or pages + len(message.pages) > self._parked_pages:
            reason = "too many destinations came before their rooms"
            self._parked.pop(message.room)
            self._over.put(message.room, reason)
            return [Send(early, Failed(message.room, reason)) for early in [*waiting, peer]]
        waiting[peer] = message
        self._parked.put(message.room, waiting)
        return []

    def _drop_parked(self, room: str, token: bytes) -> None:
        kept = {peer: early for peer, early in (self._parked.pop(room) or {}).items() if early.token != token}
        if kept:
            self._parked.put(room, kept)

    def _unpark(self, instance: str, epoch: int) -> None:
        """What this incarnation said about rooms that our log has not opened is void."""
        for room, waiting in self._parked.items():
            kept = {peer: early for peer, early in waiting.items() if (peer.instance, peer.epoch) != (instance, epoch)}
            if not kept:
                self._parked.pop(room)
            elif len(kept) < len(waiting):
                self._parked.put(room, kept)

    def _on_again(self, peer: Peer, message: Again) -> list[SenderAction]:
        room = self._rooms.get(message.room)
        if room is None or not room.fits(peer.instance, peer.epoch):
            self.counters.foreign += 1
            return []
        actions = room.send_again(peer, message.number)
        self.counters.again += any(isinstance(action, Submit) for action in actions)
        return self._ending(room, actions)

    def _on_stop(self, peer: Peer, message: Stop) -> list[SenderAction]:
        room = self._rooms.get(message.room)
        if room is None:
            self._drop_parked(message.room, message.token)
            self._stopped.put(_early(message.room, message.token), f"stopped: {message.reason}")
            return [Send(peer, Stopped(message.room))]
        if not room.opened_by(message.token):
            self.counters.unauthorized += 1
            known = peer.rank in room.flows and room.fits(peer.instance, peer.epoch)
            return [] if known else [Send(peer, Stopped(message.room))]
        if not room.fits(peer.instance, peer.epoch):
            self.counters.foreign += 1
            return [Send(peer, Stopped(message.room))]
        unbound = room.plan is None
        if room.state is Sending.DONE:
            return [Send(peer, Stopped(message.room))]
        if room.ended:
            return room.repeat(peer)
        actions = self._ending(room, room.fail(f"stopped: {message.reason}"))
        return actions + ([Send(peer, Stopped(message.room))] if unbound else [])

    def _ending(self, room: SendingRoom, actions: list[SenderAction]) -> list[SenderAction]:
        """Count what an action list ended, and forget a closed room once nothing of it is in flight."""
        for action in actions:
            if isinstance(action, Observe) and action.room == room.room:
                self.counters.done += action.topic == "transfer" and action.good
                self.counters.failed += not action.good
        if not room.closed:
            return actions
        if room.quiet:
            self._rooms.pop(room.room, None)
        return [action for action in actions if not isinstance(action, Observe)]


def _early(room: str, token: bytes) -> str:
    return f"{room}#{token.hex()}"
