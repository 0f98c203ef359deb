"""Rules of the protocol that a run checks on the way, besides the invariants of state.

In: the store, the log and the rooms of a rank, as it uses them. Out: a `Violation` when what was said once
is said otherwise later: a conclusion, a verdict, a fence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from consensus import recorder
from consensus.entry import Entry, StageKey
from consensus.recorder import Header
from consensus.status import KVPoll
from consensus.store import Update
from pipeline import snapshot
from pipeline.replay import replay
from pipeline.sequencer import Sequencer
from sim.clock import Violation
from transfer.actions import Observe
from transfer.messages import Destinations, Failed, Stopped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consensus.entry import PeerRef
    from sim.rank import RankProcess
    from transfer.actions import ReceiverAction, SenderAction
    from transfer.messages import RoomMessage

    Actions = Sequence[SenderAction] | Sequence[ReceiverAction]


def watch_store(name: str, sequencer: Sequencer) -> None:
    """FAILED is final, and of a room that the log has closed nothing is concluded any more."""
    store, rooms = sequencer.store, sequencer.core.replica.rooms
    apply = store.apply
    failed: dict[str, None] = {}

    def checked(update: Update) -> tuple[KVPoll, str] | None:
        changed = apply(update)
        if changed is None:
            return None
        if update.room not in rooms:
            raise Violation(f"{name}: a late update of rank {update.rank} brought {update.room} back into the store")
        if update.room in failed:
            raise Violation(f"{name}: {update.room} had failed in the store, and now is {changed[0].name}")
        if changed[0] is KVPoll.FAILED:
            failed[update.room] = None
        return changed

    store.apply = checked  # type: ignore[method-assign]


class OneVerdict:
    """A verdict is final: no stage of an attempt gets a second one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: dict[tuple[str, StageKey], int] = {}

    def look(self, entry: Entry) -> None:
        for verdict in entry.verdicts:
            for stage, _ in (*verdict.good, *verdict.bad):
                before = self._given.setdefault((verdict.topic, stage), entry.seq)
                if before != entry.seq:
                    raise Violation(
                        f"{self._name}: the {verdict.topic} of {stage.key.room} had its verdict at seq {before} "
                        f"and gets another at {entry.seq}"
                    )


class Memory:
    """What a rank has said of rooms and learnt of peers, and must not forget.

    What a prefill rank has said of a room before its log opens it holds when it does. Once the log has closed a
    room, whoever still sends destinations is told so, or its pages would wait for a fence for ever. And a room
    that opens against an incarnation whose death is known fails at once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._opened: dict[str, None] = {}
        self._refused: dict[str, None] = {}
        self._closed: dict[str, None] = {}
        self._dead: dict[tuple[str, int], None] = {}

    def said(self, message: RoomMessage) -> None:
        if isinstance(message, Stopped | Failed) and message.room not in self._opened:
            self._refused[message.room] = None

    def died(self, instance: str, epoch: int) -> None:
        self._dead[instance, epoch] = None

    def opened(self, room: str, peer: PeerRef, actions: Actions) -> None:
        self._opened[room] = None
        failed = any(isinstance(action, Observe) and not action.good for action in actions)
        if room in self._refused and not failed:
            raise Violation(f"{self._name} opens {room}, of which it has told a peer that it is over")
        if (peer.instance, peer.epoch) in self._dead and not failed:
            raise Violation(f"{self._name} opens {room} against {peer.instance} epoch {peer.epoch}, which is dead")

    def closed(self, room: str) -> None:
        self._closed[room] = None

    def heard(self, message: RoomMessage, actions: Actions) -> None:
        if isinstance(message, Destinations) and message.room in self._closed and not actions:
            raise Violation(f"{self._name} has closed {message.room}, and does not answer its late destinations")


def inspect(process: RankProcess) -> None:
    """A status report and a dump, as the commands make them."""
    core, replica = process.core, process.core.replica
    before = snapshot.take(replica)
    replica.audit()
    replica.leases.count()
    replica.count_requests()
    if process.sequencer is not None:
        process.sequencer.queues()
        process.sequencer.stalled(process.incarnation.now())
    state = msgspec.msgpack.encode(snapshot.take(type(replica)(replica.config)))
    header = Header(process.incarnation.name, process.name, process.incarnation.epoch, process.rank, state, "asked for")
    frames = [recorder.frame(header), *map(recorder.frame, core.recorder.records())]
    flight = recorder.read(b"".join(frames))
    if not all(step.same for step in replay(flight, type(replica))):
        raise Violation(f"{process.name}: its dump does not replay")
    if snapshot.take(replica) != before:
        raise Violation(f"{process.name}: being asked for its status changed it")
