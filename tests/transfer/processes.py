"""Ranks of the two sides, each in a process of its own or in this one, for tests that kill, freeze and restart them."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy
import zmq
from numpy.typing import NDArray

from tests.transfer.pools import BLANK, Pool, pipeline
from tests.transfer.prefill_process import BYTES_PER_TOKEN, LAYERS, PAGE_SIZE, PAGES
from tests.transfer.rig import DECODE, HOST, PREFILL, engine_for, terms
from transfer.actions import NeedPeer, Observe, Peer
from transfer.io.engine import TransferEngine
from transfer.io.receiving_port import ReceivingPort
from transfer.io.sending_port import SendingPort
from transfer.replacement import ReplacementLimits

TOKENS = PAGES * PAGE_SIZE


class DecodeRank:
    """One decode rank in this process."""

    def __init__(self, backend: str, peer_timeout: float) -> None:
        topology = pipeline(1, LAYERS, PAGE_SIZE, BYTES_PER_TOKEN)
        self.pool, self.source = Pool(topology, 0, PAGES), Pool(topology, 0, PAGES, seed=1)
        engine = engine_for(backend, self.pool)
        identity = Peer(DECODE, 1, 0)
        self.port = ReceivingPort(
            identity, topology, self.pool.regions, engine, terms(backend), HOST, peer_timeout=peer_timeout
        )
        self.told: dict[tuple[str, str], Observe] = {}
        self._poller = zmq.Poller()
        self._ticked = 0.0

    def pump(self, until: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, f"not within {seconds} s; told so far: {self.told}"
            self.port.register(self._poller)
            self._poller.poll(2)
            observed = self.port.on_readable()
            if time.monotonic() - self._ticked > 0.1:
                self._ticked = time.monotonic()
                observed += self.port.tick()
            self.note(observed)

    def idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.pump(lambda: time.monotonic() > until, seconds + 20.0)

    def note(self, observed: Sequence[Observe | NeedPeer]) -> None:
        for seen in observed:
            assert isinstance(seen, Observe) and (seen.room, seen.topic) not in self.told
            self.told[seen.room, seen.topic] = seen

    def begin(
        self,
        prefill: subprocess.Popen[str],
        room: str,
        first: int = 0,
        count: int = PAGES,
        instance: str = PREFILL,
        endless: bool = False,
    ) -> None:
        """`count` pages from the source's first ones into ours from `first` on. `endless`: it cannot end well."""
        assert prefill.stdin is not None
        print(room, count, "endless" if endless else "", file=prefill.stdin, flush=True)
        self.note(self.port.open(room, instance, 0, count * PAGE_SIZE))
        self.pump(lambda: (room, "prealloc") in self.told)
        self.note(self.port.send_destinations(room, range(first, first + count)))

    def deliver(
        self, prefill: subprocess.Popen[str], room: str, first: int, count: int, instance: str = PREFILL
    ) -> None:
        self.begin(prefill, room, first, count, instance)
        self.pump(lambda: (room, "transfer") in self.told)
        assert self.told[room, "transfer"] == Observe(room, "transfer", True, "", b"t")
        self.assert_exact(first, count)
        self.port.close(room)

    def assert_exact(self, first: int, count: int) -> None:
        assert (self.pool.data[:, :, first : first + count] == self.source.data[:, :, :count]).all()

    def landed(self) -> int:
        """Pages whose first bytes are no longer what the pool was filled with."""
        return int((self.pool.data[0, 0, :, 0, :8] != BLANK).any(axis=1).sum())


@contextmanager
def prefill_process(
    backend: str, epoch: int = 1, instance: str = PREFILL
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transfer.prefill_process", backend, str(epoch), instance],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "MC_TCP_PROGRESS_TIMEOUT_SEC": "20"},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


class DecodeProcess:
    def __init__(self, backend: str, instance: str, address: str, epoch: int = 1) -> None:
        self.instance = instance
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.decode_process", backend, instance, address, str(epoch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        self.said: dict[str, int] = {}  # "topic room" -> good, or a number
        self._lines: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # not what a killed process was in the middle of
                self._lines.put(line.split())

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def listen(self) -> None:
        while not self._lines.empty():
            first, *rest = self._lines.get()
            self.said[" ".join([first, *rest[:-1]])] = int(rest[-1]) if rest else 1

    def memory(self) -> NDArray[numpy.uint8]:
        """Its pool, looked at from outside."""
        with open(f"/proc/{self.process.pid}/mem", "rb") as memory:
            memory.seek(self.said["ready"])
            return numpy.frombuffer(memory.read(PAGES * PAGE_SIZE * LAYERS * BYTES_PER_TOKEN), dtype=numpy.uint8)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class PrefillRank:
    """In this process. The test plays its log."""

    def __init__(self, backend: str, limits: ReplacementLimits) -> None:
        topology = pipeline(1, LAYERS, PAGE_SIZE, BYTES_PER_TOKEN)
        self.pool = Pool(topology, 0, PAGES, seed=1)

        def make() -> TransferEngine:
            return engine_for(backend, self.pool, handle_deadline=2.0)

        self.port = SendingPort(
            Peer(PREFILL, 1, 0),
            topology,
            self.pool.regions,
            make(),
            terms(backend),
            HOST,
            peer_timeout=4.0,
            engine_factory=make,
            limits=limits,
        )
        self.told: dict[tuple[str, str], Observe] = {}
        self.others: list[DecodeProcess] = []
        self.stall = 0.0  # the longest that the loop was away from its poll
        self._poller = zmq.Poller()
        self._ticked = 0.0

    def decode(self, backend: str, instance: str, epoch: int = 1) -> DecodeProcess:
        self.others.append(DecodeProcess(backend, instance, self.port.address, epoch))
        return self.others[-1]

    def pump(self, until: Callable[[], object], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, f"{self.told} {[other.said for other in self.others]}"
            self.port.register(self._poller)
            self._poller.poll(2)
            woken = time.monotonic()
            observed = self.port.on_readable()
            if woken - self._ticked > 0.2:
                self._ticked = woken
                observed += self.port.tick()
            self.stall = max(self.stall, time.monotonic() - woken)
            while observed:
                seen = observed.pop(0)
                self.told[seen.room, seen.topic] = seen
            for other in self.others:
                other.listen()

    def idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.pump(lambda: time.monotonic() > until, seconds=60.0)

    def begin(self, to: DecodeProcess, room: str, first: int, count: int) -> None:
        """Its writes are on their way."""
        tokens = count * PAGE_SIZE
        for seen in self.port.open(room, to.instance, 0, tokens):
            raise AssertionError(seen)
        to.say("open", room, first, count)
        self.pump(lambda: (room, "bootstrap") in self.told)
        for seen in [
            *self.port.start(room, range(first, first + count)),
            *self.port.first_token(room, b"t"),
            *self.port.written(room, 0, tokens, (0, LAYERS)),
        ]:
            self.told[seen.room, seen.topic] = seen

    def deliver(self, to: DecodeProcess, room: str, first: int, count: int) -> None:
        self.begin(to, room, first, count)
        self.pump(lambda: (room, "transfer") in self.told and f"transfer {room}" in to.said)
        assert self.told[room, "transfer"].good and to.said[f"transfer {room}"]
        to.say("same", room)
        self.pump(lambda: f"same {room}" in to.said)
        assert to.said[f"same {room}"] == 1

    def end(self) -> None:
        for other in self.others:
            other.end()
        self.port.close_port()
