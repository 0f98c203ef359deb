"""Ports of both instances in one process, with real engines and real links.

The test plays both logs: a stage goes on once every rank has observed its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq

from tests.transfer.pools import Pool, pipeline
from transfer.actions import NeedPeer, Observe, Peer
from transfer.io.engine import TransferEngine, make_engine
from transfer.io.receiving_port import ReceivingPort
from transfer.io.sending_port import SendingPort
from transfer.messages import Terms

HOST = "127.0.0.1"
PREFILL, DECODE = "prefill", "decode"


def terms(backend: str, checksum: str = "xxh3") -> Terms:
    return Terms(model="m", kv_dtype="uint8", cache="kv", backend=backend, checksum=checksum)


def engine_for(backend: str, pool: Pool, handle_deadline: float = 20.0) -> TransferEngine:
    engine = make_engine(backend, HOST, handle_deadline=handle_deadline)
    for bases in pool.regions.bases:
        for base in bases:
            engine.register(base, pool.regions.nbytes(pool.first_layer))
    return engine


class Rig:
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
    ) -> None:
        self.source = pipeline(prefill, layers, page_size, bytes_per_token)
        self.destination = pipeline(decode, layers, page_size, bytes_per_token)
        self.src = [Pool(self.source, rank, pages, seed=rank + 1) for rank in range(prefill)]
        self.dst = [Pool(self.destination, rank, pages) for rank in range(decode)]
        self.senders = [
            SendingPort(
                Peer(PREFILL, 1, rank),
                self.source,
                pool.regions,
                engine_for(backend, pool),
                terms(backend),
                HOST,
                peer_timeout,
            )
            for rank, pool in enumerate(self.src)
        ]
        self.receivers = [
            ReceivingPort(
                Peer(DECODE, 1, rank),
                self.destination,
                pool.regions,
                engine_for(backend, pool),
                terms(backend),
                HOST,
                peer_timeout,
            )
            for rank, pool in enumerate(self.dst)
        ]
        self.told: dict[tuple[str, int, str, str], Observe] = {}
        for receiver in self.receivers:
            receiver.introduce(PREFILL, [sender.address for sender in self.senders])
        self._poller = zmq.Poller()
        self._ticked = 0.0

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exception: object) -> None:
        for port in self.ports():
            port.close_port()

    def ports(self) -> list[SendingPort | ReceivingPort]:
        return [*self.senders, *self.receivers]

    def note(self, side: str, rank: int, observed: Sequence[Observe | NeedPeer]) -> None:
        for observation in observed:
            assert isinstance(observation, Observe), observation
            key = (side, rank, observation.room, observation.topic)
            assert key not in self.told, f"{key} told twice"
            self.told[key] = observation

    def each(self, side: str, call: Callable[[SendingPort | ReceivingPort], Sequence[Observe | NeedPeer]]) -> None:
        for rank, port in enumerate(self.senders if side == PREFILL else self.receivers):
            self.note(side, rank, call(port))

    def pump(self, until: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, f"not within {seconds} s; told so far: {list(self.told)}"
            for port in self.ports():
                port.register(self._poller)
            self._poller.poll(20)
            self.each(PREFILL, lambda port: port.on_readable())
            self.each(DECODE, lambda port: port.on_readable())
            if time.monotonic() - self._ticked > 0.2:
                self._ticked = time.monotonic()
                self.each(PREFILL, lambda port: port.tick())
                self.each(DECODE, lambda port: port.tick())

    def heard(self, side: str, room: str, topic: str) -> list[Observe]:
        ranks = len(self.senders if side == PREFILL else self.receivers)
        keys = [(side, rank, room, topic) for rank in range(ranks)]
        return [self.told[key] for key in keys if key in self.told]

    def all_heard(self, side: str, room: str, topic: str) -> bool:
        return len(self.heard(side, room, topic)) == len(self.senders if side == PREFILL else self.receivers)

    # ---- the two logs

    def begin(self, room: str, tokens: int, src_pages: list[int], dst_pages: list[int]) -> None:
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
