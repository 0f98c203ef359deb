"""All rooms of one decode rank.

In: what the log decided (`open`, `send_destinations`, `stop`, `close`), what peers said,
which peers came, went or died. Out: actions; the shell only carries them out.

Invariants: a room opens against one incarnation of a prefill instance; death is a level,
not an edge: a room that opens against a dead incarnation fails at once; losing a peer ends
rooms but fences nothing, only its own word or the proof of its death does; a room that is
not fenced is never forgotten, closed or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from .actions import NeedPeer, Observe, Peer, ReceiverAction, Send
from .messages import Again, Destinations, Failed, Finished, FinishedAck, RoomMessage, Slice, Stop, Stopped
from .plan import Topology, TransferPlan
from .receiving_room import Receiving, ReceivingRoom
from .tombstones import Remembered


@dataclass(slots=True)
class ReceiverCounters:
    opened: int = 0
    done: int = 0
    failed: int = 0
    foreign: int = 0
    unexpected: int = 0
    damaged: int = 0  # slices that did not match their checksums


@dataclass(frozen=True, slots=True)
class ReceivingStatus:
    room: str
    state: str
    reason: str
    unfenced: int  # sources whose writes may still land in the room's pages


class ReceivingSide:
    def __init__(
        self, rank: int, topology: Topology, checksums: bool = False, leased: bool = False, remembered: int = 65536
    ) -> None:
        """`leased`: the engine checks each write against what was granted, so that a revoked lease is a fence."""
        self.rank, self.topology = rank, topology
        self._checksums, self._leased = checksums, leased
        self.counters = ReceiverCounters()
        self._rooms: dict[str, ReceivingRoom] = {}
        self._ready: dict[str, tuple[int, TransferPlan]] = {}  # instance -> (epoch, plan) of the welcomed one
        self._dead: Remembered[str] = Remembered(remembered)  # "instance#epoch" -> reason
        self._over: Remembered[tuple[str, str]] = Remembered(remembered)  # room -> (instance, reason)

    # ---- peers

    def peer_ready(self, instance: str, epoch: int, source_topology: Topology) -> list[ReceiverAction]:
        """All links to source ranks that feed us are welcomed. Raises `PlanError` if we do not fit."""
        plan = TransferPlan(source_topology, self.topology)
        actions: list[ReceiverAction] = []
        before = self._ready.get(instance)
        if before is not None and before[0] < epoch:
            actions += self.peer_lost(instance, before[0], f"{instance} restarted as epoch {epoch}", dead=False)
        self._ready[instance] = (epoch, plan)
        for room in list(self._rooms.values()):
            if room.instance == instance and room.state is Receiving.HANDSHAKING:
                if room.epoch in (0, epoch):
                    actions += self._ending(room, room.ready(epoch, plan, self.rank))
                elif room.epoch < epoch:
                    reason = f"{instance} epoch {room.epoch} is gone, epoch {epoch} answers"
                    actions += self._ending(room, room.fail(reason))
        return actions

    def peer_reconnected(self, peer: Peer) -> list[ReceiverAction]:
        """The link to this rank is new, and whatever the old one lost must be said again."""
        actions: list[ReceiverAction] = []
        for room in self._rooms.values():
            if room.fits(peer.instance, peer.epoch):
                actions += room.repeat(peer)
        return actions

    def peer_lost(self, instance: str, epoch: int, reason: str, dead: bool) -> list[ReceiverAction]:
        """`dead`: its processes are proven dead and the backend's tail has passed; this fences."""
        ready = self._ready.get(instance)
        if ready is not None and ready[0] == epoch:
            del self._ready[instance]
        if dead:
            self._dead.put(f"{instance}#{epoch}", reason)
        actions: list[ReceiverAction] = []
        for room in list(self._rooms.values()):
            if room.instance == instance and room.epoch == epoch:
                actions += self._ending(room, room.dead(reason) if dead else room.fail(reason))
        return actions

    def peer_refused(self, instance: str, reason: str) -> list[ReceiverAction]:
        """It will not or cannot talk to us: rooms that wait for it fail. The next one may try again."""
        actions: list[ReceiverAction] = []
        for room in list(self._rooms.values()):
            if room.instance == instance and room.state is Receiving.HANDSHAKING:
                actions += self._ending(room, room.fail(reason))
        return actions

    def awaited(self) -> tuple[tuple[str, int], ...]:
        """(instance, epoch) that rooms wait for, a word or a fence; the shell watches over their silence."""
        return tuple(dict.fromkeys((r.instance, r.epoch) for r in self._rooms.values() if not r.quiet))

    def on_message(self, peer: Peer, message: RoomMessage) -> list[ReceiverAction]:
        room = self._rooms.get(message.room)
        if isinstance(message, Destinations | Stop | Again | FinishedAck):
            self.counters.unexpected += 1
            return []
        if room is None:
            return self._on_unknown(peer, message)
        if room.epoch == 0 and room.instance == peer.instance and isinstance(message, Failed):
            return self._ending(room, room.fail(message.reason))  # its side ended before our handshake did
        if (room.instance, room.epoch) != (peer.instance, peer.epoch):
            self.counters.foreign += 1
            return []
        match message:
            case Slice():
                return self._ending(room, room.slice(peer, message))
            case Finished():
                return self._ending(room, room.finished(peer, message))
            case Stopped():
                return self._ending(room, room.stopped(peer))
            case Failed():
                return self._ending(room, room.fail(message.reason))
            case _:
                assert_never(message)

    # ---- the log

    def open(self, room: str, instance: str, epoch: int, prompt_len: int, token: bytes = b"") -> list[ReceiverAction]:
        """`token` shows its source ranks that the room is ours."""
        assert room not in self._rooms and prompt_len > 0, f"{room} of {prompt_len} positions"
        record = ReceivingRoom(room, instance, epoch, prompt_len, self._checksums, self._leased, token)
        self._rooms[room] = record
        self.counters.opened += 1
        over = self._over.pop(room)
        dead = self._dead.get(f"{instance}#{epoch}")
        if dead is not None:
            return self._ending(record, record.fail(dead))
        if over is not None and over[0] == instance:
            return self._ending(record, record.fail(over[1]))
        ready = self._ready.get(instance)
        if ready is None or ready[0] < epoch:
            return [NeedPeer(instance, epoch)]
        if epoch not in (0, ready[0]):
            return self._ending(record, record.fail(f"{instance} epoch {epoch} is gone, epoch {ready[0]} answers"))
        return self._ending(record, record.ready(ready[0], ready[1], self.rank))

    def send_destinations(self, room: str, pages: Sequence[int]) -> list[ReceiverAction]:
        """Our pages for the prompt, in order of position. From here on they may be written until `release`."""
        record = self._rooms.get(room)
        return [] if record is None else self._ending(record, record.send_destinations(pages))

    def stop(self, room: str, reason: str) -> list[ReceiverAction]:
        record = self._rooms.get(room)
        return [] if record is None else self._ending(record, record.stop(reason))

    def close(self, room: str) -> list[ReceiverAction]:
        """The log ended the request. A room that is not fenced yet is kept until it is."""
        record = self._rooms.get(room)
        if record is None:
            return []
        actions = record.fail("closed", tell=False)
        record.closed = True
        return [action for action in self._ending(record, actions) if not isinstance(action, Observe)]

    # ---- the engine

    def verified(self, room: str, source: int, number: int, sound: bool) -> list[ReceiverAction]:
        """The answer to a `Verify`; of a room that is gone it means nothing any more."""
        self.counters.damaged += not sound
        record = self._rooms.get(room)
        return [] if record is None else self._ending(record, record.verified(source, number, sound))

    def revoked(self, room: str) -> list[ReceiverAction]:
        record = self._rooms.get(room)
        return [] if record is None else self._ending(record, record.revoked())

    # ---- status

    def rooms(self) -> tuple[ReceivingStatus, ...]:
        return tuple(
            ReceivingStatus(room.room, room.state.value, room.reason, room.unfenced) for room in self._rooms.values()
        )

    def unfenced(self) -> int:
        return sum(room.unfenced for room in self._rooms.values() if not room.quiet and not room.live)

    # ---- inside

    def _on_unknown(self, peer: Peer, message: Slice | Finished | Stopped | Failed) -> list[ReceiverAction]:
        """Before the log opened the room, or after it closed it."""
        match message:
            case Finished():  # we had said destinations, so it is over: let the other side forget it too
                return [Send(peer, FinishedAck(message.room))]
            case Failed():
                self._over.put(message.room, (peer.instance, message.reason))
                return []
            case Slice() | Stopped():
                return []
            case _:
                assert_never(message)

    def _ending(self, room: ReceivingRoom, actions: list[ReceiverAction]) -> list[ReceiverAction]:
        for action in actions:
            if isinstance(action, Observe) and action.room == room.room:
                self.counters.done += action.topic == "transfer" and action.good
                self.counters.failed += not action.good
        if room.closed and room.quiet:
            self._rooms.pop(room.room, None)
            return [action for action in actions if not isinstance(action, Observe)]
        return actions
