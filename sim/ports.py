"""A rank's end of the KV hand-over: the real `SendingSide` or `ReceivingSide`, simulated links and engine.

In: effects of the core, batches that ran, messages, completions. Out: observations for the rank. These
stand where `transfer.io`'s ports stand in production, and decide as little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.effects import CloseRoom, FirstToken, OpenRoom, RoomEffect, SendDestinations, StartSender, StopRoom
from pipeline.local import Observation
from pipeline.planner import Batch
from sim.engine import SimEngine
from sim.link import REDIAL, SILENCE, Link
from sim.rules import Memory
from transfer.actions import Grant, NeedPeer, Observe, Peer, ReceiverAction, Revoke, Send, SenderAction, Submit, Verify
from transfer.messages import Again, Destinations, Failed, Finished, RoomMessage, Stop, Stopped
from transfer.plan import Topology, TransferPlan
from transfer.receiver import ReceivingSide
from transfer.sender import SendingSide

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.rank import RankProcess


def _observation(seen: Observe) -> Observation:
    return Observation(seen.room, seen.topic, seen.good, seen.reason, seen.payload)


class SendingPort:
    """On a prefill rank."""

    def __init__(self, owner: RankProcess, topology: Topology) -> None:
        self.owner, self.topology = owner, topology
        self.identity = Peer(owner.incarnation.name, owner.incarnation.epoch, owner.rank)
        self.sampler = owner.rank == len(topology.shards) - 1
        case = owner.world.case
        self.side = SendingSide(owner.rank, topology, self.sampler, case.checksums, parked_rooms=case.parked)
        self._memory = Memory(owner.name)
        self.engine = SimEngine(owner, self.side, self.apply)
        self._bound: dict[Peer, tuple[Link, int]] = {}
        self._silent: dict[Peer, int] = {}

    # -- for the rank --------------------------------------------------------------------------------

    def perform(self, effect: RoomEffect) -> None:
        match effect:
            case OpenRoom(key, peer, prompt_len, token):
                actions = self.side.open(key.room, peer.instance, peer.epoch, prompt_len, token)
                self._memory.opened(key.room, peer, actions)
                self.apply(actions)
                self._forge(key.room, peer.instance, prompt_len)
            case StartSender(room, pages):
                self.apply(self.side.start(room, pages))
            case FirstToken(room, payload):
                if self.sampler:
                    self.apply(self.side.first_token(room, payload))
            case StopRoom(room, reason):
                self.apply(self.side.stop(room, reason))
            case CloseRoom(room):
                self._memory.closed(room)
                self.apply(self.side.close(room))
            case SendDestinations():
                raise AssertionError("prefill has no destinations")

    def ran(self, batch: Batch) -> None:
        layers = self.topology.shards[self.owner.rank].layers
        for row in batch.rows:
            self.apply(self.side.written(row.key.room, row.start, row.start + len(row.tokens), layers))

    def peer_lost(self, instance: str, epoch: int, reason: str, dead: bool) -> None:
        for peer in [peer for peer in self._bound if (peer.instance, peer.epoch) == (instance, epoch)]:
            link, number = self._bound.pop(peer)
            if link.number == number:
                link.break_off()
        if dead:
            self._memory.died(instance, epoch)
        self.apply(self.side.peer_lost(instance, epoch, reason, dead))

    def _forge(self, room: str, instance: str, prompt_len: int) -> None:
        """Somebody who knows the room's name but not its token speaks for its target ranks, and hears the answer."""
        pages = tuple(range(-(-prompt_len // self.topology.page_size)))
        for peer in [peer for peer in self._bound if peer.instance == instance]:
            for forged in (Destinations(room, prompt_len, pages, b"forged"), Stop(room, "forged", b"forged")):
                actions = self.side.on_message(peer, forged)
                self.apply(
                    [a for a in actions if not isinstance(a, Send) or not isinstance(a.message, Failed | Stopped)]
                )

    # -- for the links -------------------------------------------------------------------------------

    def accept(self, link: Link, number: int, welcome: Callable[[], None]) -> None:
        peer = link.port.identity
        newest = max((other.epoch for other in self._bound if other.instance == peer.instance), default=0)
        if peer.epoch < newest:
            return
        self._bound[peer] = (link, number)
        self._silent.pop(peer, None)
        welcome()
        self.apply(self.side.peer_connected(peer, link.port.topology))

    def heard(self, link: Link, number: int, message: RoomMessage) -> None:
        peer = link.port.identity
        if self._bound.get(peer) == (link, number):
            if isinstance(message, Again):
                self.owner.world.asked_again(self.owner, peer, message.room)
            actions = self.side.on_message(peer, message)
            self._memory.heard(message, actions)
            self.apply(actions)

    def lost_sight(self, link: Link) -> None:
        """The connection broke. This end has no way to see it, but it will find the peer silent."""
        peer = link.port.identity
        if peer in self._bound and peer not in self._silent:
            self._silent[peer] = 0
            self.owner.world.clock.after(REDIAL, self._look, peer)

    def _look(self, peer: Peer) -> None:
        if self.owner.held(self._look, peer):
            return
        bound = self._bound.get(peer)
        if not self.owner.alive or peer not in self._silent or bound is None:
            return
        awaited = self.side.awaited()
        wanted = (peer.instance, peer.epoch) in awaited or (peer.instance, 0) in awaited
        self._silent[peer] = self._silent[peer] + REDIAL if wanted else 0
        if self._silent[peer] >= SILENCE:
            del self._silent[peer]
            self.peer_lost(peer.instance, peer.epoch, f"no word from {peer.instance}", dead=False)
        else:
            self.owner.world.clock.after(REDIAL, self._look, peer)

    # -- actions -------------------------------------------------------------------------------------

    def apply(self, actions: Sequence[SenderAction]) -> None:
        for action in actions:
            match action:
                case Observe():
                    self.owner.observe(_observation(action))
                case Send(peer, message):
                    if isinstance(message, Stopped | Finished) and not self.owner.world.case.leased:
                        self.owner.world.fenced(self.owner, peer, message.room, isinstance(message, Stopped))
                    self._memory.said(message)
                    bound = self._bound.get(peer)
                    if bound is not None and bound[0].number == bound[1]:
                        bound[0].down(bound[1], message)
                case Submit():
                    known = action.peer in self._bound
                    self.engine.submit(action, self.owner.world.incarnated(action.peer) if known else None)


class ReceivingPort:
    """On a decode rank."""

    def __init__(self, owner: RankProcess, topology: Topology) -> None:
        self.owner, self.topology = owner, topology
        self.identity = Peer(owner.incarnation.name, owner.incarnation.epoch, owner.rank)
        self.side = ReceivingSide(owner.rank, topology, owner.world.case.checksums, owner.world.case.leased)
        self.granted: dict[str, tuple[int, ...]] = {}  # room → pages
        self._memory = Memory(owner.name)
        self.links: dict[str, dict[int, Link]] = {}
        self._epoch: dict[str, int] = {}  # that welcomed us
        self._wanted: dict[str, int] = {}  # newest that a room asked for
        self._ready: dict[str, bool] = {}

    # -- for the rank --------------------------------------------------------------------------------

    def perform(self, effect: RoomEffect) -> None:
        match effect:
            case OpenRoom(key, peer, prompt_len, token):
                actions = self.side.open(key.room, peer.instance, peer.epoch, prompt_len, token)
                self._memory.opened(key.room, peer, actions)
                self.apply(actions)
            case SendDestinations(room, pages):
                self.apply(self.side.send_destinations(room, pages))
            case StopRoom(room, reason):
                self.apply(self.side.stop(room, reason))
            case CloseRoom(room):
                self.apply(self.side.close(room))
            case StartSender() | FirstToken():
                raise AssertionError("decode sends no KV")

    def ran(self, batch: Batch) -> None:
        """Nothing is handed over from here."""

    def peer_lost(self, instance: str, epoch: int, reason: str, dead: bool) -> None:
        if self._epoch.get(instance) == epoch:
            self._forget(instance)
        if dead:
            self._memory.died(instance, epoch)
        self.apply(self.side.peer_lost(instance, epoch, reason, dead))

    # -- for the links -------------------------------------------------------------------------------

    def wanted_epoch(self, instance: str) -> int:
        return self._epoch.get(instance) or self._wanted.get(instance, 0)

    def wants(self, instance: str) -> bool:
        known = (0, self._epoch.get(instance, 0), self._wanted.get(instance, 0))
        return any(name == instance and epoch in known for name, epoch in self.side.awaited())

    def welcomed(self, link: Link) -> None:
        peer, instance = link.peer, link.instance
        assert peer is not None
        self._epoch[instance] = peer.epoch
        self._check_ready(instance)
        self.apply(self.side.peer_reconnected(peer))

    def refused(self, link: Link, reason: str) -> None:
        """Another incarnation answers there: what we had is over, the next room asks anew."""
        epoch = self._epoch.get(link.instance, 0)
        self._forget(link.instance)
        self.apply(self.side.peer_refused(link.instance, reason))
        if epoch:
            self.apply(self.side.peer_lost(link.instance, epoch, reason, dead=False))

    def silent(self, link: Link) -> None:
        reason, epoch = f"no word from {link.instance}", self._epoch.get(link.instance, 0)
        self._ready[link.instance] = False
        self.apply(self.side.peer_refused(link.instance, reason))
        if epoch:
            self.apply(self.side.peer_lost(link.instance, epoch, reason, dead=False))

    def heard(self, peer: Peer, message: RoomMessage) -> None:
        self.apply(self.side.on_message(peer, message))

    # -- actions -------------------------------------------------------------------------------------

    def apply(self, actions: Sequence[ReceiverAction]) -> None:
        for action in actions:
            match action:
                case Observe():
                    self.owner.observe(_observation(action))
                case Send(peer, message):
                    link = self.links.get(peer.instance, {}).get(peer.rank)
                    if link is not None and link.peer == peer:
                        link.up(message)
                case Grant(room, pages):
                    self.granted[room] = pages
                case Revoke(room):
                    self._soon(self._revoke, room)
                case Verify():
                    self._soon(self._verify, action)
                case NeedPeer(instance, epoch):
                    self._need(instance, epoch)

    def _soon(self, call: Callable[[Any], None], what: object) -> None:
        world = self.owner.world
        world.clock.after(world.chance.between(world.chance.delays.engine), call, what)

    def _revoke(self, room: str) -> None:
        if self.owner.alive:
            del self.granted[room]
            self.owner.world.refuse(self.owner, room)
            self.apply(self.side.revoked(room))

    def _verify(self, asked: Verify) -> None:
        if self.owner.alive:
            sound = self.owner.kv.checksums(asked.layers, asked.spans) == asked.checksums
            self.apply(self.side.verified(asked.room, asked.source, asked.number, sound))

    def _need(self, instance: str, epoch: int) -> None:
        if epoch > self._epoch.get(instance, 0) > 0:
            self._forget(instance)  # those we talk to are over; ask whoever listens there now
        self._wanted[instance] = max(epoch, self._wanted.get(instance, 0))
        links = self.links.setdefault(instance, {})
        if not links:
            plan = TransferPlan(self.owner.world.topology(instance), self.topology)
            for flow in plan.sources(self.owner.rank):
                links[flow.rank] = Link(self.owner.world, self, instance, flow.rank)
        self._ready[instance] = False
        for link in links.values():
            if link.peer is None:
                link.dial()
        self._check_ready(instance)

    def _check_ready(self, instance: str) -> None:
        """All ranks that feed us have welcomed us."""
        if not self._ready.get(instance) and all(link.peer is not None for link in self.links[instance].values()):
            self._ready[instance] = True
            self.apply(self.side.peer_ready(instance, self._epoch[instance], self.owner.world.topology(instance)))

    def _forget(self, instance: str) -> None:
        for link in self.links.pop(instance, {}).values():
            link.close()
        self._epoch.pop(instance, None)
        self._wanted.pop(instance, None)
        self._ready[instance] = False
