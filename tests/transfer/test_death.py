"""A prefill rank in another process is killed or frozen in the middle of a transfer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from tests.transfer.pools import Pool, pipeline
from tests.transfer.prefill_process import BYTES_PER_TOKEN, LAYERS, PAGE_SIZE, PAGES
from tests.transfer.rig import DECODE, HOST, PREFILL, engine_for, terms
from transfer.actions import Observe, Peer
from transfer.io.receiving_port import ReceivingPort

TOKENS = PAGES * PAGE_SIZE


class DecodeRank:
    """One decode rank in this process."""

    def __init__(self, backend: str, peer_timeout: float) -> None:
        topology = pipeline(1, LAYERS, PAGE_SIZE, BYTES_PER_TOKEN)
        self.pool = Pool(topology, 0, PAGES)
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

    def note(self, observed: list) -> None:  # type: ignore[type-arg]
        for seen in observed:
            assert (seen.room, seen.topic) not in self.told
            self.told[seen.room, seen.topic] = seen

    def begin(self, prefill: subprocess.Popen[str], room: str) -> None:
        assert prefill.stdin is not None
        print(room, TOKENS, file=prefill.stdin, flush=True)
        self.note(self.port.open(room, PREFILL, 0, TOKENS))
        self.pump(lambda: (room, "prealloc") in self.told)
        self.note(self.port.send_destinations(room, range(PAGES)))

    def landed(self) -> int:
        """Pages whose first bytes are no longer what the pool was filled with."""
        return int((self.pool.data[0, 0, :, 0, :8] != 0xEE).any(axis=1).sum())


@contextmanager
def prefill_process(backend: str, epoch: int = 1) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transfer.prefill_process", backend, str(epoch)],
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


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_a_killed_prefill_is_noticed_in_time_and_fenced_only_by_proof(backend: str) -> None:
    decode = DecodeRank(backend, peer_timeout=2.0)
    with prefill_process(backend) as (prefill, address):
        decode.port.introduce(PREFILL, [address])
        decode.begin(prefill, "a/0")
        decode.pump(lambda: decode.landed() > 0)
        prefill.kill()
        prefill.wait()
        killed = time.monotonic()
        decode.pump(lambda: ("a/0", "transfer") in decode.told)
        assert time.monotonic() - killed < 2.0 + 2.5
        assert not decode.told["a/0", "transfer"].good
        assert ("a/0", "release") not in decode.told
        assert decode.port.side.unfenced() == 1
        decode.note(decode.port.peer_dead(PREFILL, 1, "reaped"))
        assert decode.told["a/0", "release"].good
        assert decode.port.close("a/0") == [] and decode.port.side.rooms() == ()
    with prefill_process(backend, epoch=2) as (prefill, address):
        decode.port.introduce(PREFILL, [address])
        decode.begin(prefill, "a/1")
        decode.pump(lambda: ("a/1", "transfer") in decode.told)
        assert decode.told["a/1", "transfer"] == Observe("a/1", "transfer", True, "", b"t")
        assert (decode.pool.data == Pool(pipeline(1, LAYERS, PAGE_SIZE, BYTES_PER_TOKEN), 0, PAGES, 1).data).all()
    decode.port.close_port()


def test_a_frozen_prefill_fails_its_room_and_fences_it_when_it_thaws() -> None:
    decode = DecodeRank("mooncake", peer_timeout=0.8)
    with prefill_process("mooncake") as (prefill, address):
        decode.port.introduce(PREFILL, [address])
        decode.begin(prefill, "a/0")
        decode.pump(lambda: decode.landed() > 0)
        prefill.send_signal(signal.SIGSTOP)
        decode.pump(lambda: ("a/0", "transfer") in decode.told)
        assert "no word" in decode.told["a/0", "transfer"].reason
        assert ("a/0", "release") not in decode.told
        prefill.send_signal(signal.SIGCONT)
        decode.pump(lambda: ("a/0", "release") in decode.told)
        assert decode.told["a/0", "release"].good, "it came back and said that all of its writes have ended well"
    decode.port.close_port()
