"""Real libraries, real deaths: a decode rank is killed or frozen while it is written to, and the engine replaced."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy
import pytest
import zmq
from numpy.typing import NDArray

from tests.transfer.pools import Pool, pipeline
from tests.transfer.prefill_process import BYTES_PER_TOKEN, LAYERS, PAGE_SIZE, PAGES
from tests.transfer.rig import HOST, PREFILL, engine_for, terms
from transfer.actions import Observe, Peer
from transfer.io.engine import TransferEngine, make_engine
from transfer.io.sending_port import SendingPort
from transfer.replacement import DEFAULT_LIMITS, ReplacementLimits

BACKENDS = ["mooncake", "nixl"]


class DecodeProcess:
    def __init__(self, backend: str, instance: str, address: str) -> None:
        self.instance = instance
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.decode_process", backend, instance, address],
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

    def decode(self, backend: str, instance: str) -> DecodeProcess:
        self.others.append(DecodeProcess(backend, instance, self.port.address))
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_decode_rank_holds_no_pages_and_another_one_is_served_all_the_while(backend: str) -> None:
    rank = PrefillRank(backend, replace(DEFAULT_LIMITS, replace_after=1.0))
    try:
        victim, healthy = rank.decode(backend, "victim"), rank.decode(backend, "healthy")
        rank.pump(lambda: "ready" in victim.said and "ready" in healthy.said)
        rank.deliver(victim, "warm/0", 0, 1)
        rank.deliver(healthy, "warm/1", 0, 1)
        rank.begin(victim, "a/0", 0, PAGES)
        victim.process.kill()
        rank.pump(rank.port.side.unproven)
        number = 0
        while ("a/0", "release") not in rank.told or number < 3:
            rank.deliver(healthy, f"b/{number}", number % PAGES, 1)
            rank.idle(0.05)
            number += 1
            assert number < 500
        assert not rank.told["a/0", "transfer"].good and rank.port.slot.replacements == 1
        assert rank.port.side.unproven() == 0 and rank.port.side.trailing() > 0
        rank.deliver(healthy, "c/0", 3, 20)
        assert rank.stall < 1.0, "the loop waited for an engine"
    finally:
        rank.end()


def frozen(backend: str, thaw_before_the_tail: bool) -> None:
    """Bytes that kernels hold of a destroyed engine land before the fence, and none after it."""
    tail = 4.0
    rank = PrefillRank(backend, replace(DEFAULT_LIMITS, replace_after=0.5, drain=1.0, tail=tail))
    try:
        victim = rank.decode(backend, "victim")
        rank.pump(lambda: "ready" in victim.said)
        rank.deliver(victim, "warm/0", 0, 1)
        victim.process.send_signal(signal.SIGSTOP)
        for seen in rank.port.open("a/0", "victim", 0, (PAGES - 1) * PAGE_SIZE):
            raise AssertionError(seen)
        victim.say("open", "a/0", 1, PAGES - 1)
        victim.process.send_signal(signal.SIGCONT)
        rank.pump(lambda: ("a/0", "bootstrap") in rank.told)
        rank.port.start("a/0", range(1, PAGES))
        rank.port.first_token("a/0", b"t")
        rank.port.written("a/0", 0, (PAGES - 1) * PAGE_SIZE, (0, LAYERS))
        rank.pump(lambda: rank.port.counters().handles_submitted > 1)
        victim.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        rank.pump(lambda: ("a/0", "release") in rank.told, seconds=60)
        destroyed = time.monotonic()
        print(f"{backend}: released {destroyed - stopped:.1f} s after the freeze", file=sys.stderr)
        assert rank.port.slot.replacements >= 1
        rank.pool.data[:] = 0x99  # the next owner of the source pages: none of it may arrive anywhere
        rank.idle(1.0 if thaw_before_the_tail else tail + 3.0)
        before = victim.memory()
        victim.process.send_signal(signal.SIGCONT)
        if thaw_before_the_tail:
            rank.idle(0.5)
            assert "release a/0" not in victim.said
            assert (victim.memory() != before).any(), "nothing was on its way: the experiment shows nothing"
        rank.pump(lambda: "release a/0" in victim.said, seconds=60)
        assert time.monotonic() - destroyed > tail
        assert victim.said["transfer a/0"] == 0
        for _ in range(2):
            rank.idle(0.7)
            victim.said.pop("changed a/0", None)
            victim.say("check", "a/0")
            rank.pump(lambda: "changed a/0" in victim.said)
            assert victim.said["changed a/0"] == 0, "bytes landed after the fence"
        assert rank.stall < 1.0, "the loop waited for an engine"
    finally:
        rank.end()


@pytest.mark.parametrize("backend", ["mooncake", pytest.param("nixl", marks=pytest.mark.soak)])
def test_what_a_frozen_rank_was_sent_lands_before_the_fence(backend: str) -> None:
    frozen(backend, thaw_before_the_tail=True)


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_thaws_after_the_tail_is_not_fenced_before_it_has_read_what_waits_for_it(backend: str) -> None:
    frozen(backend, thaw_before_the_tail=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_engines_of_one_process_register_the_same_memory_and_one_outlives_the_other(backend: str) -> None:
    pool, other = (Pool(pipeline(1, 2, 4, 64), 0, 8, seed=seed) for seed in (1, 2))
    target, first = engine_for(backend, other), engine_for(backend, pool)
    second = engine_for(backend, pool)
    write = [(pool.regions.bases[0][0], other.regions.bases[0][0], pool.regions.nbytes(0))]
    for number, engine in ((1, first), (2, second)):
        engine.connect("t", target.endpoint())
        engine.submit(number, "t", write, "room")
        assert arrives(engine)
    assert first.close() and first.close(), "destroyed, however often it is asked"
    pool.data[:] = 0x33
    second.submit(3, "t", write, "room")
    assert arrives(second) and (other.data[0, 0] == 0x33).all()
    third = engine_for(backend, pool)
    third.connect("t", target.endpoint())
    third.submit(4, "t", write, "room")
    assert arrives(third)
    assert all(engine.close() for engine in (second, third, target))


def arrives(engine: TransferEngine) -> bool:
    end = time.monotonic() + 20.0
    while not (ended := engine.poll()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return [one.error for one in ended] == [None]


def test_the_end_of_mooncake_holds_up_nobody_even_if_a_stranger_hangs_on_its_port() -> None:
    """Its destructor holds Python's lock while it waits for whoever connected and says nothing."""
    import socket

    engine = make_engine("mooncake", HOST)
    port = int(engine.endpoint().rsplit(b":", 1)[1])
    mute = [socket.create_connection((HOST, port), timeout=2.0) for _ in range(3)]
    time.sleep(0.1)
    gaps: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not stop.wait(0.001):
            last, gap = time.monotonic(), time.monotonic() - last
            gaps.append(gap)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert engine.close()
    stop.set()
    watcher.join()
    assert max(gaps) < 2.0
    for one in mute:
        one.close()
