"""Ports of both instances in one process, with real engines and real links.

The test plays both logs: a stage goes on once every rank has observed its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import zmq

from security.secrets import Secrets
from tests.transfer.faults import FaultyEngine
from tests.transfer.pools import Memory, Pool, pipeline
from transfer.actions import NeedPeer, Observe, Peer
from transfer.io.engine import LeasingEngine, TransferEngine, make_engine
from transfer.io.receiving_port import ReceivingPort
from transfer.io.sending_port import SendingPort
from transfer.messages import Terms
from transfer.plan import Topology
from transfer.replacement import DEFAULT_LIMITS, ReplacementLimits

HOST = "127.0.0.1"
PREFILL, DECODE = "prefill", "decode"

# On one host the stream engine copies through shared memory; as "stream-tcp" it does what it does between hosts.
REAL = ("mooncake", "nixl", "stream", "stream-tcp")
UNLEASED = ("mooncake", "nixl")  # of these only the sender's word is a fence
on_real_engines = pytest.mark.parametrize("backend", REAL)


def terms(backend: str, checksum: str = "xxh3") -> Terms:
    return Terms(model="m", kv_dtype="uint8", cache="kv", backend=backend.removesuffix("-tcp"), checksum=checksum)


def engine_for(backend: str, memory: Memory, handle_deadline: float = 20.0) -> TransferEngine:
    engine = make_engine(backend.removesuffix("-tcp"), HOST, handle_deadline=handle_deadline)
    engine.register(memory.address, memory.nbytes, None if backend.endswith("-tcp") else memory.descriptor)
    return engine


class Ports:
    """Both sides' ports over any memory. A sender's engine is replaced when writes end badly if there are `limits`."""

    def __init__(
        self,
        backend: str,
        source: Topology,
        src: Sequence[Memory],
        destination: Topology,
        dst: Sequence[Memory],
        peer_timeout: float = 10.0,
        checksum: str = "xxh3",
        limits: ReplacementLimits | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        self.secrets = secrets
        self.backend, self.source, self.destination = backend, source, destination
        self.peer_timeout = peer_timeout
        agreed = terms(backend, checksum)
        self.senders: list[SendingPort] = []
        self.engines: list[FaultyEngine] = []  # the first one of each sender
        for rank, memory in enumerate(src):

            def make(memory: Memory = memory) -> FaultyEngine:
                return FaultyEngine(engine_for(backend, memory))

            engine = make()
            port = SendingPort(
                Peer(PREFILL, 1, rank),
                source,
                memory.regions,
                engine,
                agreed,
                HOST,
                peer_timeout,
                engine_factory=make if limits else None,
                limits=limits or DEFAULT_LIMITS,
                secrets=secrets,
            )
            self.senders.append(port)
            self.engines.append(engine)
        self.receivers = [self.receiver(rank, memory, checksum=checksum) for rank, memory in enumerate(dst)]
        self.told: dict[tuple[str, int, str, str], Observe] = {}
        for receiver in self.receivers:
            receiver.introduce(PREFILL, [sender.address for sender in self.senders])
        self._poller = zmq.Poller()
        self._ticked = 0.0

    def receiver(self, rank: int, memory: Memory, epoch: int = 1, checksum: str = "xxh3") -> ReceivingPort:
        return ReceivingPort(
            Peer(DECODE, epoch, rank),
            self.destination,
            memory.regions,
            engine_for(self.backend, memory),
            terms(self.backend, checksum),
            HOST,
            self.peer_timeout,
            secrets=self.secrets,
        )

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *exception: object) -> None:
        for port in self.ports():
            port.close_port()

    def ports(self) -> list[SendingPort | ReceivingPort]:
        return [*self.senders, *self.receivers]

    @property
    def leased(self) -> bool:
        """The receivers' engines check each write, so that they need nobody's word for a fence."""
        return isinstance(self.receivers[0].engine, LeasingEngine)

    def note(self, side: str, rank: int, observed: Sequence[Observe | NeedPeer]) -> None:
        for observation in observed:
            assert isinstance(observation, Observe), observation
            key = (side, rank, observation.room, observation.topic)
            assert key not in self.told, f"{key} told twice"
            self.told[key] = observation

    def each(self, side: str, call: Callable[[SendingPort | ReceivingPort], Sequence[Observe | NeedPeer]]) -> None:
        for rank, port in enumerate(self.senders if side == PREFILL else self.receivers):
            self.note(side, rank, call(port))

    def turn(self, milliseconds: int = 20) -> None:
        """Once around both loops."""
        for port in self.ports():
            port.register(self._poller)
        self._poller.poll(milliseconds)
        self.each(PREFILL, lambda port: port.on_readable())
        self.each(DECODE, lambda port: port.on_readable())
        if time.monotonic() - self._ticked > 0.2:
            self._ticked = time.monotonic()
            self.each(PREFILL, lambda port: port.tick())
            self.each(DECODE, lambda port: port.tick())

    def pump(self, until: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, f"not within {seconds} s; told so far: {list(self.told)}"
            self.turn()

    def idle(self, seconds: float) -> None:
        """Nothing is waited for; whatever comes in this time is taken."""
        end = time.monotonic() + seconds
        self.pump(lambda: time.monotonic() > end, seconds + 20.0)

    def heard(self, side: str, room: str, topic: str) -> list[Observe]:
        ranks = len(self.senders if side == PREFILL else self.receivers)
        keys = [(side, rank, room, topic) for rank in range(ranks)]
        return [self.told[key] for key in keys if key in self.told]

    def all_heard(self, side: str, room: str, topic: str) -> bool:
        return len(self.heard(side, room, topic)) == len(self.senders if side == PREFILL else self.receivers)

    # ---- the two logs

    def begin(self, room: str, tokens: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """Up to the point where the prefill may run."""
        for rank, sender in enumerate(self.senders):
            self.note(PREFILL, rank, sender.open(room, DECODE, 0, tokens))
        for rank, receiver in enumerate(self.receivers):
            self.note(DECODE, rank, receiver.open(room, PREFILL, self.senders[0].identity.epoch, tokens))
        self.pump(lambda: self.all_heard(DECODE, room, "prealloc"))
        for rank, receiver in enumerate(self.receivers):
            self.note(DECODE, rank, receiver.send_destinations(room, dst_pages))
        self.pump(lambda: self.all_heard(PREFILL, room, "bootstrap"))
        for rank, sender in enumerate(self.senders):
            self.note(PREFILL, rank, sender.start(room, src_pages))

    def prefill(self, room: str, start: int, end: int) -> None:
        for rank, sender in enumerate(self.senders):
            self.note(PREFILL, rank, sender.written(room, start, end, self.source.shards[rank].layers))

    def sample(self, room: str, payload: bytes) -> None:
        self.note(PREFILL, len(self.senders) - 1, self.senders[-1].first_token(room, payload))

    def finish(self, room: str) -> None:
        self.pump(lambda: self.all_heard(DECODE, room, "transfer") and self.all_heard(PREFILL, room, "transfer"))

    def stop(self, side: str, room: str, reason: str = "abort") -> None:
        self.each(side, lambda port: port.stop(room, reason))

    def close(self, room: str) -> None:
        self.each(PREFILL, lambda port: port.close(room))
        self.each(DECODE, lambda port: port.close(room))

    def assert_baseline(self) -> None:
        """Rooms and handles are as before the first request, once the last words have come."""
        self.pump(lambda: not any(port.side.rooms() for port in self.ports()))
        assert [port.side.in_flight() + port.side.unproven() for port in self.senders] == [0] * len(self.senders)
        assert [engine.handles_outstanding for engine in self.engines] == [0] * len(self.engines)
        assert [port.side.unfenced() for port in self.receivers] == [0] * len(self.receivers)


class Rig(Ports):
    """Over pools of random bytes."""

    def __init__(
        self,
        backend: str,
        prefill: int,
        decode: int,
        layers: int = 6,
        pages: int = 32,
        page_size: int = 4,
        bytes_per_token: int = 64,
        peer_timeout: float = 10.0,
        checksum: str = "xxh3",
        limits: ReplacementLimits | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        source = pipeline(prefill, layers, page_size, bytes_per_token)
        destination = pipeline(decode, layers, page_size, bytes_per_token)
        self.src = [Pool(source, rank, pages, seed=rank + 1) for rank in range(prefill)]
        self.dst = [Pool(destination, rank, pages) for rank in range(decode)]
        super().__init__(backend, source, self.src, destination, self.dst, peer_timeout, checksum, limits, secrets)

    def __enter__(self) -> Rig:
        return self

    def hand_over(self, room: str, tokens: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """From the start to its end, and the bytes are right."""
        self.begin(room, tokens, src_pages, dst_pages)
        self.prefill(room, 0, tokens)
        self.sample(room, b"t")
        self.finish(room)
        assert all(seen.good for side in (PREFILL, DECODE) for seen in self.heard(side, room, "transfer"))
        self.assert_exact(tokens, src_pages, dst_pages)
        self.close(room)

    def assert_exact(self, tokens: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        for layer in range(self.source.layer_count):
            source = next(p for p in self.src if p.regions.layers[0] <= layer < p.regions.layers[1])
            target = next(p for p in self.dst if p.regions.layers[0] <= layer < p.regions.layers[1])
            sent, landed = source.tokens(layer, list(src_pages), tokens), target.tokens(layer, list(dst_pages), tokens)
            assert (landed == sent).all(), f"layer {layer}"
