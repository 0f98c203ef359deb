"""Everything a prefill rank needs to hand over KV: side, engine and link in one object.

    port = SendingPort(identity, topology, regions, engine, terms, host)
    publish(port.address)                              # decode ranks dial it
    loop:
        port.register(poller)                          # before every poll: cheap, idempotent
        observations += port.on_readable()             # after every wake-up, whatever woke it
        observations += port.tick()                    # about once a second
    port.open(...) .start(...) .written(...) .first_token(...) .stop(...) .close(...)

Every method returns the observations it led to, at once or never: nothing is called back.
All calls come from the rank's one control thread and none of them blocks; only the
engine's own start (`register`, `endpoint`) does. `close_port` destroys the engine.

With an `engine_factory`, an engine with handles of unknown fate is replaced (see
`EngineSlot`): its end releases our pages, and `limits.tail` later `Stopped` is said for
theirs. A new engine writes only to a peer that was heard since its start was begun: the
first contact with a mute one can freeze a library. Submits that must wait are held, at
most `HELD` and `limits.hold` seconds; after that their rooms fail, with the reason.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import assert_never, cast

import zmq

from security.secrets import Secrets

from ..actions import Observe, Peer, Send, SenderAction, Submit
from ..handshake import misfit, objection, unspecified
from ..messages import Frame, Hello, Ping, Pong, Refused, Reset, Terms, Welcome
from ..plan import Topology
from ..regions import RegionError, RegionTable, resolve
from ..replacement import DEFAULT_LIMITS, ReplacementLimits, Tails
from ..sender import SendingSide
from .checksums import NONE, Checksums
from .engine import Completion, EngineCounters, TransferEngine
from .engine_slot import Destroyed, EngineFactory, EngineSlot, Retired, SlotEvent, Started, Starting
from .link import LinkServer

log = logging.getLogger(__name__)

HELD = 4096  # submits that wait
COMPLAIN_INTERVAL = 1.0  # between two lines of the log about peers that were refused


class SendingPort:
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
        engine_factory: EngineFactory | None = None,
        limits: ReplacementLimits = DEFAULT_LIMITS,
        secrets: Secrets | None = None,
    ) -> None:
        """`regions` must be registered with the engine already; `terms.backend` is the engine's name.

        `engine_factory` makes another such engine, on a thread of its own. Without it none is ever replaced."""
        if unspecified(host):
            raise ValueError(f"the link needs an address that decode ranks can reach, not {host!r}")
        if (reason := misfit(regions, topology, identity.rank)) is not None:
            raise ValueError(reason)
        assert terms.backend == engine.name
        self.identity = identity
        self.slot = EngineSlot(engine, engine_factory, limits)
        self.tails = Tails(limits)
        self._checksums = None if terms.checksum == NONE else Checksums(regions)
        last = identity.rank == len(topology.shards) - 1
        self.side = SendingSide(identity.rank, topology, last, self._checksums is not None)
        self.link = LinkServer(f"tcp://{host}:0", identity, peer_timeout, secrets)
        self.address = self.link.address
        self._terms, self._topology, self._regions, self._host = terms, topology, regions, host
        self._clock, self._limits = clock, limits
        self._peers: dict[Peer, Hello] = {}
        self._secured = secrets is not None
        self._named: dict[str, int] = {}  # instance → newest incarnation that the log has named
        self._doubted: dict[Peer, Hello] = {}  # that say they are of a newer one, which anyone may say
        self._unheard: dict[Peer, None] = {}  # since the start of a new engine was begun
        self._unreached: dict[Peer, None] = {}  # of those, which the engine that serves does not know therefore
        self._held: dict[int, tuple[Submit, float]] = {}  # by handle, with the moment it is given up
        # By handle: what its slice hashes to, None until that is known, and whether its write has ended well.
        self._hashes: dict[int, bytes | None] = {}
        self._written: dict[int, None] = {}
        self._retired = 0
        self._complained = float("-inf")
        self._registered: dict[zmq.Poller, tuple[int, ...]] = {}

    @property
    def engine(self) -> TransferEngine:
        """The latest."""
        return self.slot.latest

    @property
    def held(self) -> int:
        return len(self._held)

    def counters(self) -> EngineCounters:
        """Of all engines so far."""
        return self.slot.counters()

    # ---- the loop

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self.link.socket, zmq.POLLIN)
        if self.link.gatekeeper is not None:
            poller.register(self.link.gatekeeper.socket, zmq.POLLIN)
        wanted = self.slot.descriptors()
        if self._checksums is not None:
            wanted += (self._checksums.fd,)
        for descriptor in self._registered.get(poller, ()):
            if descriptor not in wanted:
                poller.unregister(descriptor)
        for descriptor in wanted:
            poller.register(descriptor, zmq.POLLIN)
        self._registered[poller] = wanted

    def on_readable(self) -> list[Observe]:
        now = self._clock()
        observed: list[Observe] = []
        for route, frame in self.link.receive(now):
            observed += self._on_frame(route, frame, now)
        for completion in self.slot.poll(now):
            observed += self._ended(completion)
        if self._checksums is not None:
            for handle, checksums in self._checksums.results():
                observed += self._hashed(cast(int, handle), checksums)
        return observed + self._replace(now)

    def tick(self) -> list[Observe]:
        now = self._clock()
        awaited = self.side.awaited()
        observed: list[Observe] = []
        for peer, binding in list(self.link.bindings.items()):
            wanted = (peer.instance, peer.epoch) in awaited or (peer.instance, 0) in awaited
            binding.liveness.watch(now, wanted)
            if binding.liveness.lost(now):
                observed += self.peer_lost(peer.instance, peer.epoch, f"no word from {_name(peer)}", dead=False)
            elif binding.liveness.ping_due(now):
                self.link.send(peer, Ping())
        for peer in self.tails.unheard(now):
            if peer in self.link.bindings:
                self.link.send(peer, Ping())
        for engine, peer in self.tails.passed(now):
            observed += self._apply(self.side.tail_passed(engine, peer))
        return observed + self._replace(now)

    # ---- the log and the executor

    def open(self, room: str, instance: str, epoch: int, prompt_len: int, token: bytes = b"") -> list[Observe]:
        if epoch > self._named.get(instance, 0):
            self._named[instance] = epoch
        observed: list[Observe] = []
        for peer in [peer for peer in self._doubted if peer.instance == instance and self._believed(peer)]:
            observed += self._meet(peer, self._doubted.pop(peer))
        return observed + self._apply(self.side.open(room, instance, epoch, prompt_len, token))

    def start(self, room: str, pages: Sequence[int]) -> list[Observe]:
        return self._apply(self.side.start(room, pages))

    def written(self, room: str, start: int, end: int, layers: tuple[int, int]) -> list[Observe]:
        return self._apply(self.side.written(room, start, end, layers))

    def first_token(self, room: str, payload: bytes) -> list[Observe]:
        return self._apply(self.side.first_token(room, payload))

    def stop(self, room: str, reason: str) -> list[Observe]:
        return self._apply(self.side.stop(room, reason))

    def close(self, room: str) -> list[Observe]:
        return self._apply(self.side.close(room))

    def peer_lost(self, instance: str, epoch: int, reason: str, dead: bool) -> list[Observe]:
        """`dead`: it will not come back; also for what the rank hears elsewhere, from the registry for one."""
        log.warning("decode instance %s epoch %d is lost: %s", instance, epoch, reason)
        for peer in [peer for peer in self._peers if (peer.instance, peer.epoch) == (instance, epoch)]:
            self.link.forget(peer)
            self.slot.drop(_key(peer))
            del self._peers[peer]
            self._unreached.pop(peer, None)
        for peer in [peer for peer in self._doubted if (peer.instance, peer.epoch) == (instance, epoch)]:
            self.link.forget(peer)
            del self._doubted[peer]
        return self._apply(self.side.peer_lost(instance, epoch, reason, dead))

    def close_port(self) -> None:
        self.link.close()
        self.slot.close()
        if self._checksums is not None:
            self._checksums.close()

    # ---- inside

    def _on_frame(self, route: bytes, frame: Frame, now: float) -> list[Observe]:
        peer = Peer(frame.instance, frame.epoch, frame.rank)
        self._heard(peer, now)
        match frame.body:
            case Hello() as hello:
                return self._on_hello(route, frame, peer, hello, now)
            case Ping():
                self.link.send(peer, Pong())
                return []
            case Pong() | Welcome() | Refused() | Reset():
                return []
            case message:
                return self._apply(self.side.on_message(peer, message))

    def _on_hello(self, route: bytes, frame: Frame, peer: Peer, hello: Hello, now: float) -> list[Observe]:
        reason = self._refusal(peer, hello)
        observed = [] if reason else self._make_place(peer)
        if reason is None and not self.link.accept(route, frame, now, Welcome(self._topology)):
            reason = "too many peers"
        if reason is not None:
            self.link.counters.refused += 1
            if now - self._complained >= COMPLAIN_INTERVAL:
                self._complained = now
                log.warning("refused %s: %s", _name(peer), reason)
            self.link.answer(route, frame, Refused(reason[:1000]))
            return observed
        if not self._believed(peer):
            self._doubted[peer] = hello
            return observed
        return observed + self._meet(peer, hello)

    def _believed(self, peer: Peer) -> bool:
        """Whether it may end what an older incarnation has here. Without secrets the log must have named it."""
        named = self._named.get(peer.instance, 0)
        return self._secured or not named or peer.epoch <= named

    def _meet(self, peer: Peer, hello: Hello) -> list[Observe]:
        self._peers[peer] = hello
        self._connect(peer)
        observed = self._apply(self.side.peer_connected(peer, hello.topology))
        older = [old for old in self._peers if old.instance == peer.instance and old.epoch < peer.epoch]
        for epoch in dict.fromkeys(old.epoch for old in older):
            observed += self.peer_lost(peer.instance, epoch, f"it restarted as epoch {peer.epoch}", dead=True)
        self.tails.gone(peer.instance, peer.epoch - 1)
        return observed

    def _make_place(self, peer: Peer) -> list[Observe]:
        """Peers say no goodbye. When the link is full, the one that came first and that no room waits for leaves."""
        if peer in self.link.bindings or not self.link.full:
            return []
        awaited = self.side.awaited()
        for old in self.link.bindings:
            if (old.instance, old.epoch) not in awaited and (old.instance, 0) not in awaited:
                return self.peer_lost(old.instance, old.epoch, "its place is needed", dead=False)
        return []

    def _refusal(self, peer: Peer, hello: Hello) -> str | None:
        if hello.instance != self.identity.instance:
            return f"identity: this is {self.identity.instance}, not {hello.instance}"
        newest = max((old.epoch for old in self._peers if old.instance == peer.instance), default=0)
        if peer.epoch < newest:
            return f"epoch: {newest} of {peer.instance} is here already, {peer.epoch} is over"
        known = self.side.known_topology(peer.instance, peer.epoch)
        if known is not None and known != hello.topology:
            return f"topology: other ranks of {peer.instance} say {known}, rank {peer.rank} says {hello.topology}"
        before = self._peers.get(peer)
        if before is not None and (before.endpoint, before.regions) != (hello.endpoint, hello.regions):
            return "endpoint: it changed within one epoch"
        return objection(hello, peer.rank, self._terms, self._topology, self._host)

    def _apply(self, actions: list[SenderAction]) -> list[Observe]:
        observed: list[Observe] = []
        waiting = deque(actions)
        while waiting:
            match waiting.popleft():
                case Observe() as observation:
                    observed.append(observation)
                case Send(peer, message):
                    self.link.send(peer, message)
                case Submit() as submit:
                    waiting.extend(self._submit(submit))
        return observed

    def _submit(self, submit: Submit) -> list[SenderAction]:
        if submit.peer in self._peers and (self.slot.engine is None or submit.peer in self._unreached):
            if len(self._held) >= HELD:
                return self.side.completed(submit.handle, "too many writes wait for a transfer engine", quiet=True)
            self._held[submit.handle] = (submit, self._clock() + self._limits.hold)
            return []
        return self._give(submit)

    def _give(self, submit: Submit) -> list[SenderAction]:
        hello, engine = self._peers.get(submit.peer), self.slot.engine
        if hello is None or engine is None:
            return self.side.completed(submit.handle, "the peer is not connected", quiet=True)
        try:
            writes = resolve(self._regions, hello.regions, submit.layers, submit.heads, submit.runs)
        except RegionError as error:
            return self.side.completed(submit.handle, str(error), quiet=True)
        if self._checksums is not None:
            self._hashes[submit.handle] = None
            self._checksums.ask(submit.handle, submit.layers, submit.heads, submit.spans)
        engine.submit(submit.handle, _key(submit.peer), writes, submit.room)
        return []

    def _ended(self, completion: Completion) -> list[Observe]:
        """A write has ended. The slice has landed once its checksums are known too."""
        handle = completion.handle
        checksums = self._hashes.get(handle, b"")
        if completion.error is None and checksums is None:
            self._written[handle] = None
            return []
        self._hashes.pop(handle, None)
        return self._apply(self.side.completed(handle, completion.error, completion.quiet, checksums or b""))

    def _hashed(self, handle: int, checksums: bytes) -> list[Observe]:
        if handle in self._written:
            del self._written[handle], self._hashes[handle]
            return self._apply(self.side.completed(handle, None, checksums=checksums))
        if handle in self._hashes:
            self._hashes[handle] = checksums
        return []

    # ---- inside: the replacement of the engine

    def _connect(self, peer: Peer) -> None:
        """Only to a peer that was just heard."""
        self._unreached.pop(peer, None)
        if (engine := self.slot.engine) is not None:
            engine.connect(_key(peer), self._peers[peer].endpoint)

    def _heard(self, peer: Peer, now: float) -> None:
        self.tails.heard(peer, now)
        self._unheard.pop(peer, None)
        if peer in self._unreached:
            self._connect(peer)

    def _replace(self, now: float) -> list[Observe]:
        observed: list[Observe] = []
        for event in self.slot.step(now):
            observed += self._on_event(event, now)
        for handle, (submit, until) in list(self._held.items()):
            waits = self.slot.engine is None or submit.peer in self._unreached
            if not self.side.wanted(handle):
                actions = self.side.completed(handle, "its room ended before it began", quiet=True)
            elif waits and submit.peer in self._peers and not self.slot.reason and now < until:
                continue
            elif waits and submit.peer in self._peers:
                reason = self.slot.reason or f"no transfer engine reached {_name(submit.peer)} in time"
                actions = self.side.completed(handle, reason, quiet=True)
            else:
                actions = self._give(submit)
            del self._held[handle]
            observed += self._apply(actions)
        return observed

    def _on_event(self, event: SlotEvent, now: float) -> list[Observe]:
        match event:
            case Starting():
                self._unheard = dict.fromkeys(self._peers)
                for peer in self._peers:
                    self.link.send(peer, Ping())
            case Retired():
                self._retired = self.side.retire_engine(self._held)
            case Started():
                self._unreached = {peer: None for peer in self._peers if peer in self._unheard}
                for peer in self._peers:
                    if peer not in self._unreached:
                        self._connect(peer)
            case Destroyed(completions):
                observed: list[Observe] = []
                for completion in completions:
                    observed += self._ended(completion)
                observed += self._apply(self.side.engine_replaced(self._retired))
                self._hashes = {handle: known for handle, known in self._hashes.items() if self.side.knows(handle)}
                self._written = {handle: None for handle in self._written if handle in self._hashes}
                self.tails.destroyed(self._retired, self.side.trailing_peers(self._retired), now)
                return observed
            case _:
                assert_never(event)
        return []


def _key(peer: Peer) -> str:
    return f"{peer.instance}#{peer.epoch}#{peer.rank}"


def _name(peer: Peer) -> str:
    return f"{peer.instance} epoch {peer.epoch} rank {peer.rank}"
