"""Everything a decode rank needs to be handed KV: side, engine and links in one object.

    port = ReceivingPort(identity, topology, regions, engine, terms, host)
    port.introduce(instance, addresses)                # addresses[i]: prefill rank i's `SendingPort.address`
    loop:
        port.register(poller)                          # before every poll: cheap; links come and go
        observations += port.on_readable()             # after every wake-up, whatever woke it
        observations += port.tick()                    # about once a second
    port.open(...) .send_destinations(...) .stop(...) .close(...)
    port.peer_dead(instance, epoch, reason)            # its processes are reaped and the tail has passed

Every method returns the observations it led to, at once or never: nothing is called back.
`NeedPeer` comes among them only for an instance that was never introduced: introduce it, and
the room goes on; or call `peer_refused`. All calls come from the rank's one control thread
and none blocks. A peer that stays silent for `peer_timeout` while rooms wait for it is lost:
its rooms fail, but their pages stay unfenced until it speaks again or `peer_dead` is called.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import zmq

from security.secrets import Secrets

from ..actions import Grant, NeedPeer, Observe, Peer, ReceiverAction, Revoke, Send, Verify
from ..handshake import misfit, unspecified
from ..messages import Frame, Hello, Ping, Pong, Refused, Reset, Terms, Welcome
from ..plan import PlanError, Topology, TransferPlan
from ..receiver import ReceivingSide
from ..regions import RegionTable
from .checksums import NONE, Checksums
from .engine import Area, LeasingEngine, TransferEngine
from .link import LinkClient, LinkCounters

log = logging.getLogger(__name__)

REDIAL_INTERVAL = 2.0


@dataclass(slots=True)
class _Source:
    """A prefill instance, as far as this rank knows it."""

    addresses: tuple[str, ...]
    epoch: int = 0  # the one that welcomed us
    topology: Topology | None = None
    links: dict[int, LinkClient] = field(default_factory=dict)
    ready: bool = False


class ReceivingPort:
    def __init__(
        self,
        identity: Peer,
        topology: Topology,
        regions: RegionTable,
        engine: TransferEngine,
        terms: Terms,
        host: str,
        peer_timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        """`regions` must be registered with the engine already; `terms.backend` is the engine's name."""
        if unspecified(host):
            raise ValueError(f"a decode rank needs an address that prefill ranks can reach, not {host!r}")
        if (reason := misfit(regions, topology, identity.rank)) is not None:
            raise ValueError(reason)
        assert terms.backend == engine.name
        self.identity, self.engine = identity, engine
        self._leasing = engine if isinstance(engine, LeasingEngine) else None
        self._checksums = None if terms.checksum == NONE else Checksums(regions)
        checked, leased = self._checksums is not None, self._leasing is not None
        self.side = ReceivingSide(identity.rank, topology, checked, leased)
        self._revocations: dict[int, str] = {}  # the engine's handle for it -> room
        self._numbers = itertools.count(1)
        self._topology, self._regions, self._terms, self._host = topology, regions, terms, host
        self._timeout, self._clock = peer_timeout, clock
        self._context = context or zmq.Context.instance()
        self._secrets = secrets
        self._endpoint = engine.endpoint()
        self.link_counters = LinkCounters()  # of all links, past ones too
        self._sources: dict[str, _Source] = {}
        self._registered: dict[zmq.Poller, dict[zmq.Socket[bytes], None]] = {}

    # ---- the loop

    def register(self, poller: zmq.Poller) -> None:
        wanted: dict[zmq.Socket[bytes], None] = {}
        for link in self._links():
            wanted.update({socket: None for socket in (link.socket, link.monitor) if socket is not None})
        present = self._registered.setdefault(poller, {})
        for socket in [socket for socket in present if socket not in wanted]:
            poller.unregister(socket)
        for socket in wanted:
            poller.register(socket, zmq.POLLIN)
        self._registered[poller] = wanted
        poller.register(self.engine.completion_fd, zmq.POLLIN)
        if self._checksums is not None:
            poller.register(self._checksums.fd, zmq.POLLIN)

    def on_readable(self) -> list[Observe | NeedPeer]:
        now = self._clock()
        observed: list[Observe | NeedPeer] = []
        for instance, source in list(self._sources.items()):
            for link in list(source.links.values()):
                for frame in link.receive(now):
                    observed += self._on_frame(instance, source, link, frame, now)
                if link.down and not link.lost and link.dialled_at < now:  # it broke: one try at once, then by tick
                    self._redial(instance, source, link, now)
        for completion in self.engine.poll():
            if (room := self._revocations.pop(completion.handle, None)) is not None:
                observed += self._apply(self.side.revoked(room))
        if self._checksums is not None:
            for key, checksums in self._checksums.results():
                asked = cast(Verify, key)
                sound = checksums == asked.checksums
                if not sound:
                    log.warning("KV of %s layers %s from rank %d is damaged", asked.room, asked.layers, asked.source)
                observed += self._apply(self.side.verified(asked.room, asked.source, asked.number, sound))
        return observed

    def tick(self) -> list[Observe | NeedPeer]:
        now = self._clock()
        awaited = self.side.awaited()
        observed: list[Observe | NeedPeer] = []
        for instance, source in list(self._sources.items()):
            wanted = any(name == instance for name, _ in awaited)
            if wanted and not source.links:
                self._dial_all(instance, source, now)
            for link in list(source.links.values()):
                link.liveness.watch(now, wanted)
                if wanted and link.peer is None:
                    self._redial(instance, source, link, now)
                if link.liveness.lost(now) and not link.lost:
                    link.lost = True
                    observed += self._silent(instance, source, link)
                elif link.liveness.ping_due(now):
                    link.send(Ping())
        return observed

    # ---- peers

    def introduce(self, instance: str, addresses: Sequence[str]) -> list[Observe | NeedPeer]:
        """Where its ranks listen, in rank order. Other addresses than before: it is a new incarnation."""
        observed: list[Observe | NeedPeer] = []
        source = self._sources.get(instance)
        if source is None:
            source = self._sources[instance] = _Source(tuple(addresses))
        elif source.addresses != tuple(addresses):
            observed = self._leave(instance, source, f"{instance} listens elsewhere now")
            source.addresses = tuple(addresses)
        if any(name == instance for name, _ in self.side.awaited()):
            self._dial_all(instance, source, self._clock())
        return observed

    def peer_dead(self, instance: str, epoch: int, reason: str) -> list[Observe | NeedPeer]:
        """Every process of that incarnation is proven dead, and what its sockets still held has landed: a fence."""
        source = self._sources.get(instance)
        if source is not None and source.epoch == epoch:
            self._hang_up(source)
        return self._apply(self.side.peer_lost(instance, epoch, reason, dead=True))

    def peer_lost(self, instance: str, epoch: int, reason: str) -> list[Observe | NeedPeer]:
        """It cannot be counted on, for what the rank hears elsewhere; not a fence."""
        source = self._sources.get(instance)
        if source is not None and source.epoch == epoch:
            self._hang_up(source)
        return self._apply(self.side.peer_lost(instance, epoch, reason, dead=False))

    def peer_refused(self, instance: str, reason: str) -> list[Observe | NeedPeer]:
        return self._apply(self.side.peer_refused(instance, reason))

    # ---- the log

    def open(
        self, room: str, instance: str, epoch: int, prompt_len: int, token: bytes = b""
    ) -> list[Observe | NeedPeer]:
        return self._apply(self.side.open(room, instance, epoch, prompt_len, token))

    def send_destinations(self, room: str, pages: Sequence[int]) -> list[Observe | NeedPeer]:
        return self._apply(self.side.send_destinations(room, pages))

    def stop(self, room: str, reason: str) -> list[Observe | NeedPeer]:
        return self._apply(self.side.stop(room, reason))

    def close(self, room: str) -> list[Observe | NeedPeer]:
        return self._apply(self.side.close(room))

    def close_port(self) -> None:
        for source in self._sources.values():
            self._hang_up(source)
        self.engine.close()
        if self._checksums is not None:
            self._checksums.close()

    # ---- inside: links

    def _links(self) -> list[LinkClient]:
        return [link for source in self._sources.values() for link in source.links.values()]

    def _dial_all(self, instance: str, source: _Source, now: float) -> None:
        """Rank 0 first: its Welcome names the ranks that feed us."""
        ranks = [0]
        if source.topology is not None:
            ranks = [flow.rank for flow in TransferPlan(source.topology, self._topology).sources(self.identity.rank)]
        for rank in ranks:
            link = source.links.get(rank)
            if link is None and rank < len(source.addresses):
                link = LinkClient(
                    source.addresses[rank],
                    rank,
                    self.identity,
                    self._context,
                    self._timeout,
                    now,
                    self.link_counters,
                    self._secrets,
                )
                source.links[rank] = link
            if link is not None and link.peer is None:
                if link.lost:  # somebody asks again: it gets a whole timeout again
                    link.lost = False
                    link.liveness.watch(now, False)
                self._redial(instance, source, link, now)
            if link is not None:
                link.liveness.watch(now, True)

    def _redial(self, instance: str, source: _Source, link: LinkClient, now: float) -> None:
        if now - link.dialled_at < REDIAL_INTERVAL:
            return
        hello = Hello(
            instance=instance,
            terms=self._terms,
            topology=self._topology,
            regions=self._regions,
            endpoint=self._endpoint,
            host=self._host,
        )
        link.dial(hello, now)

    def _leave(self, instance: str, source: _Source, reason: str) -> list[Observe | NeedPeer]:
        """Those we talk to are over; ask whoever listens there now."""
        epoch = source.epoch
        self._hang_up(source)
        return self._apply(self.side.peer_lost(instance, epoch, reason, dead=False)) if epoch else []

    def _hang_up(self, source: _Source) -> None:
        for link in source.links.values():
            link.hang_up()
        source.links.clear()
        source.topology, source.epoch, source.ready = None, 0, False

    # ---- inside: frames

    def _on_frame(
        self, instance: str, source: _Source, link: LinkClient, frame: Frame, now: float
    ) -> list[Observe | NeedPeer]:
        match frame.body:
            case Welcome() as welcome:
                return self._on_welcome(instance, source, link, welcome, now)
            case Refused(reason):
                log.warning("%s rank %d refuses us: %s", instance, link.rank, reason)
                return self._gone(instance, source, link, reason)
            case Ping():
                link.send(Pong())
                return []
            case Pong() | Hello() | Reset():
                return []
            case message:
                return [] if link.peer is None else self._apply(self.side.on_message(link.peer, message))

    def _on_welcome(
        self, instance: str, source: _Source, link: LinkClient, welcome: Welcome, now: float
    ) -> list[Observe | NeedPeer]:
        peer = link.peer
        assert peer is not None, "a link learns its peer from the Welcome"
        observed: list[Observe | NeedPeer] = []
        if peer.instance != instance or (source.epoch and peer.epoch < source.epoch):
            link.hang_up()
            return self._apply(self.side.peer_refused(instance, f"{peer} answers at {link.address}"))
        try:
            plan = TransferPlan(welcome.topology, self._topology)
        except PlanError as error:
            link.hang_up()
            return self._apply(self.side.peer_refused(instance, str(error)))
        if source.epoch and peer.epoch > source.epoch:
            observed += self._apply(
                self.side.peer_lost(instance, source.epoch, f"{instance} restarted as epoch {peer.epoch}", dead=False)
            )
            for other in source.links.values():
                if other is not link:
                    other.hang_up()
            source.ready = False
        source.epoch, source.topology, link.lost = peer.epoch, welcome.topology, False
        self._dial_all(instance, source, now)
        needed = [flow.rank for flow in plan.sources(self.identity.rank)]
        if any((feeder := source.links.get(rank)) is None or feeder.peer is None for rank in needed):
            source.ready = False
        elif not source.ready:
            source.ready = True
            observed += self._apply(self.side.peer_ready(instance, peer.epoch, welcome.topology))
        return observed + self._apply(self.side.peer_reconnected(peer))

    def _silent(self, instance: str, source: _Source, link: LinkClient) -> list[Observe | NeedPeer]:
        reason = f"no word from {instance} rank {link.rank} at {link.address}"
        log.warning("%s", reason)
        return self._gone(instance, source, link, reason)

    def _gone(self, instance: str, source: _Source, link: LinkClient, reason: str) -> list[Observe | NeedPeer]:
        """Its rooms fail; the link is dialled again as long as a room waits for a fence."""
        link.hang_up()
        source.ready = False
        observed = self._apply(self.side.peer_refused(instance, reason))
        if source.epoch:
            observed += self._apply(self.side.peer_lost(instance, source.epoch, reason, dead=False))
        return observed

    def _areas(self, pages: Sequence[int]) -> list[Area]:
        """These pages in every buffer, neighbours as one."""
        runs: list[tuple[int, int]] = []
        for page in sorted(pages):
            if runs and sum(runs[-1]) == page:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((page, 1))
        areas: list[Area] = []
        for layer in range(*self._regions.layers):
            size = self._topology.page_size * self._regions.width(layer)
            for base in self._regions.buffers(layer):
                areas += [(base + first * size, count * size) for first, count in runs]
        return areas

    # ---- inside: actions

    def _apply(self, actions: list[ReceiverAction]) -> list[Observe | NeedPeer]:
        observed: list[Observe | NeedPeer] = []
        for action in actions:
            match action:
                case Observe():
                    observed.append(action)
                case Send(peer, message):
                    source = self._sources.get(peer.instance)
                    link = None if source is None else source.links.get(peer.rank)
                    if link is not None and link.peer == peer:
                        link.send(message)
                case Grant(room, pages):
                    assert self._leasing is not None
                    self._leasing.grant(room, self._areas(pages))
                case Revoke(room):
                    assert self._leasing is not None
                    number = next(self._numbers)
                    self._revocations[number] = room
                    self._leasing.revoke(number, room)
                case Verify() as asked:
                    assert self._checksums is not None
                    self._checksums.ask(asked, asked.layers, asked.heads, asked.spans)
                case NeedPeer(instance, epoch):
                    source = self._sources.get(instance)
                    if source is None:
                        observed.append(action)
                    else:
                        if epoch > source.epoch > 0:
                            observed += self._leave(instance, source, f"epoch {epoch} of {instance} was asked for")
                        self._dial_all(instance, source, self._clock())
        return observed
