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
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from ..actions import Observe, Peer, Send, SenderAction, Submit
from ..handshake import misfit, objection, unspecified
from ..messages import Frame, Hello, Ping, Pong, Refused, Reset, Terms, Welcome
from ..plan import Topology
from ..regions import RegionError, RegionTable, resolve
from ..sender import SendingSide
from .engine import TransferEngine
from .link import LinkServer

log = logging.getLogger(__name__)


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
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """`regions` must be registered with the engine already; `terms.backend` is the engine's name."""
        if unspecified(host):
            raise ValueError(f"the link needs an address that decode ranks can reach, not {host!r}")
        if (reason := misfit(regions, topology, identity.rank)) is not None:
            raise ValueError(reason)
        assert terms.backend == engine.name
        self.identity, self.engine = identity, engine
        self.side = SendingSide(identity.rank, topology, identity.rank == len(topology.shards) - 1)
        self.link = LinkServer(f"tcp://{host}:0", identity, context or zmq.Context.instance(), peer_timeout)
        self.address = self.link.address
        self._terms, self._topology, self._regions, self._host = terms, topology, regions, host
        self._clock = clock
        self._peers: dict[Peer, Hello] = {}

    # ---- the loop

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self.link.socket, zmq.POLLIN)
        poller.register(self.engine.completion_fd, zmq.POLLIN)

    def on_readable(self) -> list[Observe]:
        now = self._clock()
        observed: list[Observe] = []
        for route, frame in self.link.receive(now):
            observed += self._on_frame(route, frame, now)
        for completion in self.engine.poll():
            observed += self._apply(self.side.completed(completion.handle, completion.error, completion.quiet))
        return observed

    def tick(self) -> list[Observe]:
        now = self._clock()
        awaited = self.side.awaited()
        observed: list[Observe] = []
        for peer, binding in list(self.link.bindings.items()):
            wanted = (peer.instance, peer.epoch) in awaited or (peer.instance, 0) in awaited
            binding.liveness.watch(now, wanted)
            if binding.liveness.lost(now):
                observed += self.peer_lost(peer.instance, peer.epoch, f"no word from {_name(peer)}")
            elif binding.liveness.ping_due(now):
                self.link.send(peer, Ping())
        return observed

    # ---- the log and the executor

    def open(self, room: str, instance: str, epoch: int, prompt_len: int) -> list[Observe]:
        return self._apply(self.side.open(room, instance, epoch, prompt_len))

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

    def peer_lost(self, instance: str, epoch: int, reason: str) -> list[Observe]:
        """Also for what the rank hears elsewhere, from the registry for one."""
        log.warning("decode instance %s epoch %d is lost: %s", instance, epoch, reason)
        for peer in [peer for peer in self._peers if (peer.instance, peer.epoch) == (instance, epoch)]:
            self.link.forget(peer)
            self.engine.drop(_key(peer))
            del self._peers[peer]
        return self._apply(self.side.peer_lost(instance, epoch, reason))

    def close_port(self) -> None:
        self.link.close()
        self.engine.close()

    # ---- inside

    def _on_frame(self, route: bytes, frame: Frame, now: float) -> list[Observe]:
        peer = Peer(frame.instance, frame.epoch, frame.rank)
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
        if reason is None and not self.link.accept(route, frame, now, Welcome(self._topology)):
            reason = "too many peers"
        if reason is not None:
            log.warning("refused %s: %s", _name(peer), reason)
            self.link.answer(route, frame, Refused(reason[:1000]))
            return []
        self._peers[peer] = hello
        self.engine.connect(_key(peer), hello.endpoint)
        older = [old for old in self._peers if old.instance == peer.instance and old.epoch < peer.epoch]
        observed: list[Observe] = []
        for epoch in dict.fromkeys(old.epoch for old in older):
            observed += self.peer_lost(peer.instance, epoch, f"it restarted as epoch {peer.epoch}")
        return observed + self._apply(self.side.peer_connected(peer, hello.topology))

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
        hello = self._peers.get(submit.peer)
        if hello is None:
            return self.side.completed(submit.handle, "the peer is not connected", quiet=True)
        try:
            writes = resolve(self._regions, hello.regions, submit.layers, submit.heads, submit.runs)
        except RegionError as error:
            return self.side.completed(submit.handle, str(error), quiet=True)
        self.engine.submit(submit.handle, _key(submit.peer), writes)
        return []


def _key(peer: Peer) -> str:
    return f"{peer.instance}#{peer.epoch}#{peer.rank}"


def _name(peer: Peer) -> str:
    return f"{peer.instance} epoch {peer.epoch} rank {peer.rank}"
