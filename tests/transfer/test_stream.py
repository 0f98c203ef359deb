"""The `stream` engine: real sockets, real shared memory, and peers that stop, die, lie or say nothing.

Run as a program, this file is the other process: `send`, `receive` or `hold`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from transfer.io.engine import Completion, EngineError, LeasingEngine, make_engine
from transfer.io.stream import host as stream_host
from transfer.io.stream import receiver as stream_receiver
from transfer.io.stream import tcp as stream_tcp
from transfer.io.stream import wire as stream_wire
from transfer.io.stream.areas import Areas
from transfer.io.stream.engine import StreamEngine
from transfer.io.stream.fence import LeaseTableView
from transfer.io.stream.host import ANSWER, MAX_MESSAGE, MessageSocket
from transfer.io.stream.transfer import Transfer
from transfer.io.stream.wire import (
    HELLO,
    MAGIC,
    VERDICT,
    VERSION,
    WELCOME,
    WELCOMED,
    decode_endpoint,
    encode_endpoint,
    take_verdicts,
    verdict,
    write_frame,
)

HOST = "127.0.0.1"
MIB = 1 << 20
PATHS = ["tcp", "memory"]


class Memory:
    """Registered with an engine of its own; shared if the path is that of shared memory."""

    def __init__(self, path: str, nbytes: int, fill: int = 0, deadline: float = 20.0) -> None:
        self.descriptor: int | None = None
        if path == "memory":
            self.descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, nbytes)
            self.data: NDArray[numpy.uint8] = numpy.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=numpy.uint8)
        else:
            self.data = numpy.empty(nbytes, dtype=numpy.uint8)
        self.data[:] = fill
        self.address = int(self.data.ctypes.data)
        self.engine = StreamEngine(HOST, deadline)
        self.engine.register(self.address, nbytes, self.descriptor)

    def close(self) -> None:
        assert self.engine.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Pair:
    """A source with random bytes, connected to a target; nothing is granted yet."""

    def __init__(self, path: str, nbytes: int = 4 * MIB, deadline: float = 20.0) -> None:
        self.source = Memory("tcp", nbytes, deadline=deadline)
        self.source.data[:] = numpy.random.default_rng(7).integers(1, 256, nbytes, dtype=numpy.uint8)
        self.target = Memory(path, nbytes)
        self.a, self.b = self.source.engine, self.target.engine
        self.a.connect("b", self.b.endpoint())
        self._handles = iter(range(1, 1 << 20))

    def writes(self, *runs: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        return [(self.source.address + src, self.target.address + dst, nbytes) for src, dst, nbytes in runs]

    def areas(self, *runs: tuple[int, int]) -> list[tuple[int, int]]:
        return [(self.target.address + at, nbytes) for at, nbytes in runs]

    def send(self, lease: str, *runs: tuple[int, int, int]) -> Completion:
        handle = next(self._handles)
        self.a.submit(handle, "b", self.writes(*runs), lease)
        (ended,) = wait(self.a)
        assert ended.handle == handle
        return ended

    def close(self) -> None:
        self.source.close()
        self.target.close()


@contextlib.contextmanager
def pair(path: str, nbytes: int = 4 * MIB, deadline: float = 20.0) -> Iterator[Pair]:
    both = Pair(path, nbytes, deadline)
    try:
        yield both
    finally:
        both.close()


def wait(engine: StreamEngine, seconds: float = 20.0) -> list[Completion]:
    readable, _, _ = select.select([engine.completion_fd], [], [], seconds)
    assert readable, f"nothing ended within {seconds} s"
    return engine.poll()


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.005)


def revoke(engine: StreamEngine, lease: str) -> None:
    engine.revoke(10**6, lease)
    assert wait(engine) == [Completion(10**6)]


class Raw:
    """A peer's connection, byte by byte."""

    def __init__(self, endpoint: bytes, greet: bool = True) -> None:
        parsed = decode_endpoint(endpoint)
        self.socket = socket.create_connection((parsed.host, parsed.port), timeout=20)
        if greet:
            self.socket.sendall(HELLO.pack(MAGIC, VERSION, bytes.fromhex(parsed.incarnation), bytes(16)))
            assert self.take(WELCOME.size) == WELCOME.pack(MAGIC, VERSION, WELCOMED)

    def take(self, nbytes: int) -> bytes:
        return self.socket.recv(nbytes, socket.MSG_WAITALL)

    def verdict(self) -> tuple[int, str | None]:
        head = self.take(VERDICT.size)
        return take_verdicts(bytearray(head + self.take(VERDICT.unpack(head)[2])))[0]

    def closed(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


def frame(lease: str, sequence: int, *pieces: tuple[int, int], last: bool = True) -> bytes:
    buffer = bytearray(20000)
    size = write_frame(buffer, last, lease.encode(), sequence, numpy.array(pieces, dtype=numpy.uint64))
    return bytes(buffer[:size])


def other_process(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((".", "proto")), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        pipe.close()


# ---- bytes arrive


@pytest.mark.parametrize("path", PATHS)
def test_bytes_land_exactly_and_nowhere_else(path: str) -> None:
    with pair(path, 8 * MIB) as both:
        assert isinstance(both.b, LeasingEngine)
        both.b.grant("all", both.areas((0, 8 * MIB)))
        expected = both.target.data.copy()
        rng = random.Random(3)
        slots = rng.sample(range(2048), 1500)
        cases = [
            [(0, 5, 3)],
            [(11, 100, 2 * MIB + 7), (3 * MIB, 3 * MIB + 1, MIB), (1, 5 * MIB, 1)],
            [(slot * 1024, 6 * MIB + slot * 512, 1 + slot % 500) for slot in slots],
            [(0, 6 * MIB, 1), (5, 6 * MIB + 3, 0), (9, 6 * MIB + 9, 4096)],
        ]
        for case in cases:
            assert both.send("all", *case).error is None
            for src, dst, nbytes in case:
                expected[dst : dst + nbytes] = both.source.data[src : src + nbytes]
            assert (both.target.data == expected).all()
        counters = both.a.counters
        assert counters.bytes_done == counters.bytes_submitted == sum(run[2] for case in cases for run in case)
        assert counters.writes_done == sum(map(len, cases)) and counters.handles_done == len(cases)
        assert both.a.handles_outstanding == 0
        assert (both.b.receiver_counters.bytes_landed == 0) == (path == "memory"), "by that path"


@pytest.mark.parametrize("path", PATHS)
def test_many_handles_end_once_each(path: str) -> None:
    with pair(path) as both:
        both.b.grant("x", both.areas((0, 4 * MIB)))
        for handle in range(1000):
            both.a.submit(handle, "b", both.writes((handle * 4096, handle * 4096, 4096)), "x")
        ended: list[Completion] = []
        while len(ended) < 1000:
            ended += wait(both.a)
        assert sorted(one.handle for one in ended) == list(range(1000))
        assert not any(one.error for one in ended)
        assert (both.target.data[: 1000 * 4096] == both.source.data[: 1000 * 4096]).all()


def test_a_lease_of_more_areas_than_one_message_takes() -> None:
    with pair("memory", 8 * MIB) as both:
        both.b.grant("many", both.areas(*((at, 64) for at in range(0, 8 * MIB, 128))))
        assert both.send("many", (0, 8 * MIB - 128, 64), (1, 256, 64)).error is None
        assert both.send("many", (0, 64, 64)).error == "a write leaves the areas of its lease"
        assert not both.target.data[64:128].any()
        assert both.b.receiver_counters.bytes_landed == 0


@given(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=12), st.integers(1, 3000))
@settings(max_examples=100, deadline=None)
def test_frames_hold_each_byte_once_and_in_order(lengths: list[int], small: int) -> None:
    writes = [(at * 10**9, at * 10**10 + 7, length) for at, length in enumerate([*lengths, *[small] * small], 1)]
    transfer = Transfer(1, b"x", writes)
    cut: list[tuple[int, int, int]] = []
    while not transfer.whole:
        pieces = transfer.cut(MIB)
        assert len(pieces) <= stream_wire.FRAME_PIECES and pieces[:, 2].sum() <= MIB
        cut += map(tuple, pieces.tolist())
    joined: list[list[int]] = []
    for source, target, length in cut:
        assert length > 0
        if joined and (source, target) == (sum(joined[-1][::2]), joined[-1][1] + joined[-1][2]):
            joined[-1][2] += length
        else:
            joined.append([source, target, length])
    assert joined == [list(write) for write in writes if write[2]]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20))), st.integers(1, 70), st.integers(1, 30))
def test_an_area_covers_what_lies_in_it(areas: list[tuple[int, int]], start: int, length: int) -> None:
    inside = {at for address, nbytes in areas for at in range(address, address + nbytes)}
    numbers = [numpy.array([value], dtype=numpy.uint64) for value in (start, length)]
    assert Areas(areas).cover(numbers[0], numbers[1]) == (set(range(start, start + length)) <= inside)


def test_an_area_is_not_fooled_by_numbers_that_wrap() -> None:
    areas = Areas([(4096, 4096)])
    for address, length in [(5000, 2**64 - 4000), (2**64 - 1, 4097), (8191, 2), (8192, 1), (0, 1)]:
        assert not areas.cover(numpy.array([address], dtype=numpy.uint64), numpy.array([length], dtype=numpy.uint64))
    for bad in [(0, 5), (5, 0), (2**64 - 5, 10), (2**64, 1), (-1, 5)]:
        with pytest.raises(ValueError):
            Areas([bad])


# ---- what must not land


@pytest.mark.parametrize("path", PATHS)
def test_a_write_without_a_lease_or_outside_of_it_lands_nowhere(path: str) -> None:
    with pair(path) as both:
        both.b.grant("x", both.areas((4096, 4096), (8192, 100), (20000, 10)))
        assert "no such lease" in (both.send("y", (0, 4096, 10)).error or "")
        for bad in [(4095, 2), (8291, 2), (8292, 1), (19999, 5), (0, 4 * MIB), (20000, 11)]:
            ended = both.send("x", (0, 4100, 7), (0, *bad))
            assert ended.error == "a write leaves the areas of its lease" and ended.quiet
        assert not both.target.data.any()
        assert both.send("x", (0, 4096, 4196), (0, 20000, 10)).error is None, "the connection goes on"
        assert both.a.counters.handles_failed == 7


def test_only_registered_memory_is_granted_or_sent() -> None:
    with pair("tcp") as both:
        stranger = numpy.zeros(8192, dtype=numpy.uint8)
        with pytest.raises(EngineError, match="leaves the registered memory"):
            both.b.grant("x", [(int(stranger.ctypes.data), 8192)])
        with pytest.raises(EngineError, match="leaves the registered memory"):
            both.b.grant("x", both.areas((4 * MIB - 1, 2)))
        both.b.grant("x", both.areas((0, 8192)))
        with pytest.raises(EngineError, match="granted already"):
            both.b.grant("x", both.areas((0, 8192)))
        both.a.submit(1, "b", [(int(stranger.ctypes.data), both.target.address, 10)], "x")
        assert wait(both.a) == [Completion(1, "a write's source is not registered", quiet=True)]
        both.a.submit(2, "b", both.writes((0, 0, 10)), "")
        assert wait(both.a) == [Completion(2, "a write needs a lease of the peer", quiet=True)]
        both.a.submit(3, "nobody", both.writes((0, 0, 10)), "x")
        assert wait(both.a) == [Completion(3, "the peer is not connected", quiet=True)]
        both.a.submit(4, "b", [(-5, 1, 1)], "x")
        assert "no writes" in (wait(both.a)[0].error or "")
        both.a.submit(5, "b", [], "x")
        assert wait(both.a) == [Completion(5)]
        assert not both.target.data.any()
        for bad in [(0, 10), (5, 0)]:
            with pytest.raises(EngineError, match="no region"):
                both.b.register(*bad)


# ---- fences


def test_a_revoke_in_the_middle_of_a_frame_is_complete_at_once() -> None:
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, MIB)))
        peer = Raw(both.b.endpoint())
        peer.socket.sendall(frame("x", 1, (both.target.address, 100_000), (both.target.address + 200_000, 100_000)))
        peer.socket.sendall(b"\x01" * 120_000)
        until(lambda: both.b.receiver_counters.bytes_landed == 120_000)
        revoke(both.b, "x")
        then = both.target.data.copy()
        assert then[200_000:220_000].all() and not then[220_000:].any()
        assert peer.verdict() == (1, "the lease was revoked")
        peer.socket.sendall(b"\x02" * 80_000)
        peer.socket.sendall(frame("x", 2, (both.target.address, 10)) + b"\x03" * 10)
        assert peer.verdict() == (2, "there is no such lease, or it was revoked")
        assert (both.target.data == then).all()
        both.b.grant("x", both.areas((0, 10)))
        peer.socket.sendall(frame("x", 3, (both.target.address, 10)) + b"\x04" * 10)
        assert peer.verdict() == (3, None)
        assert both.target.data[:10].tolist() == [4] * 10


@pytest.mark.parametrize("path", PATHS)
def test_leases_are_revoked_once_and_unknown_ones_at_once(path: str) -> None:
    with pair(path) as both:
        revoke(both.b, "never granted")
        both.b.grant("x", both.areas((0, 100)))
        assert both.send("x", (0, 0, 100)).error is None
        revoke(both.b, "x")
        revoke(both.b, "x")
        assert "revoked" in (both.send("x", (0, 0, 100)).error or "")
        both.b.grant("x", both.areas((200, 100)))
        assert both.send("x", (0, 0, 100)).error == "a write leaves the areas of its lease"
        assert both.send("x", (0, 200, 100)).error is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fate", ["busy", "stopped", "killed"])
def test_nothing_lands_after_a_revoke_whatever_the_sender_does(path: str, fate: str) -> None:
    target = Memory(path, 64 * MIB)
    target.engine.grant("x", [(target.address, 64 * MIB)])
    sender = other_process("send", target.engine.endpoint().decode(), str(target.address), str(64 * MIB))
    try:
        for _ in range(3):
            assert sender.stdout.readline() == "sent\n"
        if fate == "stopped":
            sender.send_signal(signal.SIGSTOP)
        elif fate == "killed":
            sender.kill()
        target.engine.revoke(1, "x")
        if fate == "stopped" and path == "memory":
            with contextlib.suppress(AssertionError):  # it may have been stopped in mid copy
                assert wait(target.engine, 0.5) == [Completion(1)]
                target.engine.revoke(1, "x")
            sender.send_signal(signal.SIGCONT)
        assert wait(target.engine) == [Completion(1)]
        target.data[:] = 0
        if fate == "stopped":
            sender.send_signal(signal.SIGCONT)
        if fate != "killed":
            assert "revoked" in next(line for line in sender.stdout if line != "sent\n")
        assert not target.data.any()
        assert (target.engine.receiver_counters.bytes_landed > 0) == (path == "tcp")
    finally:
        end(sender)
        target.close()


def test_a_process_stopped_in_mid_copy_holds_the_fence_until_it_is_dead() -> None:
    target = Memory("memory", MIB)
    target.engine.grant("x", [(target.address, MIB)])
    holder = other_process("hold", target.engine.endpoint().decode())
    try:
        assert holder.stdout.readline() == "held\n"
        target.engine.grant("y", [(target.address, MIB)])
        target.engine.revoke(1, "x")
        target.engine.revoke(2, "x")
        revoke(target.engine, "y")
        assert not select.select([target.engine.completion_fd], [], [], 0.3)[0], "it may still be written"
        holder.kill()
        assert wait(target.engine) == [Completion(1), Completion(2)]
    finally:
        end(holder)
        target.close()


def test_an_engine_is_not_closed_while_a_stopped_process_is_in_mid_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.io.stream.engine.CLOSE_TIMEOUT", 0.3)
    target = Memory("memory", MIB)
    target.engine.grant("x", [(target.address, MIB)])
    holder = other_process("hold", target.engine.endpoint().decode())
    try:
        assert holder.stdout.readline() == "held\n"
        target.engine.revoke(1, "x")
        assert not target.engine.close()
        end(holder)
        until(target.engine.close)
        assert target.engine.poll() == [Completion(1)]
        assert target.engine.close()
    finally:
        end(holder)
        os.close(target.descriptor)


# ---- peers that are gone, or others


@pytest.mark.parametrize("path", PATHS)
def test_a_receiver_that_is_killed_ends_the_handles(path: str) -> None:
    source = Memory("tcp", 32 * MIB)
    receiver = other_process("receive", path, str(32 * MIB))
    try:
        said = json.loads(receiver.stdout.readline())
        source.engine.connect("b", said["endpoint"].encode())
        writes = [(source.address, said["address"], 32 * MIB)]
        source.engine.submit(0, "b", writes, "x")
        assert wait(source.engine) == [Completion(0)]
        for handle in range(1, 100):
            source.engine.submit(handle, "b", writes, "x")
        receiver.kill()
        ended: list[Completion] = []
        while len(ended) < 99:
            ended += wait(source.engine)
        assert ended[-1].error and ended[-1].quiet
        assert len({one.handle for one in ended}) == 99 and source.engine.handles_outstanding == 0
        source.engine.submit(200, "b", writes, "x")
        assert wait(source.engine)[0].error, "nobody listens there any more"
    finally:
        end(receiver)
        source.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_restarted_engine_at_the_same_port_is_another_one(path: str) -> None:
    source, target = Memory("tcp", MIB, fill=9), Memory(path, MIB)
    target.engine.grant("x", [(target.address, MIB)])
    now = decode_endpoint(target.engine.endpoint())
    before = msgspec.structs.replace(now, incarnation="0" * 32)
    source.engine.connect("b", encode_endpoint(before))
    for handle in (1, 2):
        source.engine.submit(handle, "b", [(source.address, target.address, 10)], "x")
        (ended,) = wait(source.engine)
        assert "restarted" in (ended.error or "") and ended.quiet
    assert target.engine.receiver_counters.strangers == 1, "which is final"
    assert not target.data.any()
    source.engine.connect("b", target.engine.endpoint())
    source.engine.submit(3, "b", [(source.address, target.address, 10)], "x")
    assert wait(source.engine) == [Completion(3)]
    source.close()
    target.close()


@pytest.mark.parametrize("broken", ["no socket", "another host"])
def test_without_shared_memory_it_goes_by_tcp(broken: str) -> None:
    with pair("memory") as both:
        both.b.grant("x", both.areas((0, MIB)))
        endpoint = decode_endpoint(both.b.endpoint())
        if broken == "no socket":
            endpoint = msgspec.structs.replace(endpoint, memory="paceline-stream-nobody")
        else:
            endpoint = msgspec.structs.replace(endpoint, boot="another")
        both.a.connect("b", encode_endpoint(endpoint))
        assert both.send("x", (0, 0, MIB)).error is None
        assert both.b.receiver_counters.bytes_landed == MIB


def test_an_unsealed_or_short_file_is_no_shared_memory() -> None:
    engine = StreamEngine(HOST, 20.0)
    data = numpy.zeros(MIB, dtype=numpy.uint8)
    for flags, size in ((0, MIB), (os.MFD_ALLOW_SEALING, MIB - 1)):
        descriptor = os.memfd_create("test", flags | os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        with pytest.raises(EngineError, match="no region"):
            engine.register(int(data.ctypes.data), MIB, descriptor)
        os.close(descriptor)
    assert engine.close()


@pytest.mark.parametrize(
    "endpoint",
    [
        b"",
        b"\xff" * 40,
        b"mooncake/1 127.0.0.1:9",
        b"stream/1 []",
        b'stream/1 ["127.0.0.1",0,"00000000000000000000000000000000","",""]',
        b'stream/1 ["somewhere.example",80,"00000000000000000000000000000000","",""]',
        b'stream/1 ["127.0.0.1",80,"0","",""]',
        b'stream/1 ["127.0.0.1",80,"00000000000000000000000000000000","","/etc/passwd"]',
        b"stream/1 " + b"[" * 2000,
    ],
)
def test_a_malformed_endpoint_fails_its_own_handles(endpoint: bytes) -> None:
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, 10)))
        both.a.connect("c", endpoint)
        both.a.submit(1, "c", both.writes((0, 0, 10)), "x")
        (ended,) = wait(both.a)
        assert "the peer's endpoint is" in (ended.error or "") and ended.quiet
        assert both.send("x", (0, 0, 10)).error is None


@pytest.mark.parametrize("answers", [b"", WELCOME.pack(MAGIC, VERSION, WELCOMED)])
def test_a_peer_that_accepts_and_never_answers_meets_the_deadline(answers: bytes) -> None:
    with socket.create_server((HOST, 0)) as mute, pair("tcp", deadline=0.5) as both:
        endpoint = msgspec.structs.replace(decode_endpoint(both.b.endpoint()), port=mute.getsockname()[1])
        both.a.connect("c", encode_endpoint(endpoint))
        connection, _ = mute.accept()
        connection.sendall(answers)
        for handle in (1, 2):
            both.a.submit(handle, "c", both.writes((0, 0, MIB)), "x")
        ended: list[Completion] = []
        while len(ended) < 2:
            ended += wait(both.a)
        assert [one.error for one in ended] == ["no answer of the peer within 0.5 s"] * 2
        connection.close()


def test_a_port_that_does_not_welcome_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_tcp, "CONNECT_DEADLINE", 0.2)
    with socket.create_server((HOST, 0)) as mute, pair("tcp") as both:
        endpoint = msgspec.structs.replace(decode_endpoint(both.b.endpoint()), port=mute.getsockname()[1])
        both.a.connect("c", encode_endpoint(endpoint))
        both.a.submit(1, "c", both.writes((0, 0, MIB)), "x")
        assert wait(both.a) == [Completion(1, "the peer's port does not answer", quiet=True)]


@pytest.mark.parametrize(
    "lie",
    [b"HTTP/1.1 200 OK\r\n\r\n", WELCOME.pack(MAGIC, VERSION, WELCOMED) + verdict(9, None), b"\xff" * 300],
)
def test_a_target_that_lies_is_given_up(lie: bytes) -> None:
    with socket.create_server((HOST, 0)) as liar, pair("tcp") as both:
        endpoint = msgspec.structs.replace(decode_endpoint(both.b.endpoint()), port=liar.getsockname()[1])
        both.a.connect("c", encode_endpoint(endpoint))
        connection, _ = liar.accept()
        both.a.submit(1, "c", both.writes((0, 0, MIB)), "x")
        connection.sendall(lie)
        (ended,) = wait(both.a)
        assert ended.error and ended.quiet
        connection.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_dropped_peer_ends_its_handles_and_comes_back_by_connecting(path: str) -> None:
    with pair(path) as both:
        both.b.grant("x", both.areas((0, 4 * MIB)))
        for handle in range(1000, 1200):
            both.a.submit(handle, "b", both.writes((0, 0, 4 * MIB)), "x")
        both.a.drop("b")
        ended: list[Completion] = []
        while len(ended) < 200:
            ended += wait(both.a)
        assert ended[-1] == Completion(1199, "the peer was dropped", quiet=True)
        assert both.send("x", (0, 0, 10)).error == "the peer is not connected"
        both.a.connect("b", both.b.endpoint())
        assert both.send("x", (0, 0, 10)).error is None


def test_more_handles_than_the_limit_are_refused_at_once() -> None:
    engine = StreamEngine(HOST, 20.0, max_handles=2)
    for handle in range(3):
        engine.submit(handle, "nobody", [], "x")
    ended: list[Completion] = []
    while len(ended) < 3:
        ended += wait(engine)
    assert Completion(2, "too many transfers are outstanding", quiet=True) in ended
    assert engine.close() and engine.handles_outstanding == 0


# ---- the port, and who else may be there


def bad_frames(address: int) -> list[bytes]:
    good = frame("x", 1, (address, 100))
    return [
        random.Random(1).randbytes(5000),
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(100),
        good[:4] + b"\x07" + good[5:],  # flags
        good[:6] + b"\xff\xff" + good[8:],  # a lease of 65535 bytes
        good[:16] + b"\xff\xff\xff\xff" + good[20:],  # that many pieces
        good[:20] + b"\xff\xff\xff\xff" + good[24:],  # 4 GiB of payload
        good[:16] + bytes(4) + good[20:],  # no pieces
        good[:20] + b"\x63" + good[21:] + bytes(100),  # pieces that are more than the payload
        frame("x", 1, (address, 50), (address, 2**64 - 1), (address, 51)) + bytes(100),  # sums that wrap
        frame("x", 0, (address, 1)) + b"a" + frame("x", 0, (address, 1)),  # a handle that was complete
        frame("x", 5, (address, 1), last=False) + b"a" + frame("x", 6, (address, 1)),  # one left open
    ]


def test_malformed_frames_close_their_own_connection_only() -> None:
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, 4096)))
        assert both.send("x", (0, 4000, 10)).error is None
        then = both.target.data.copy()
        bad = bad_frames(both.target.address)
        for count, data in enumerate(bad, 1):
            peer = Raw(both.b.endpoint())
            with contextlib.suppress(ConnectionError):
                peer.socket.sendall(data)
                while peer.socket.recv(4096):
                    pass
            until(lambda count=count: both.b.receiver_counters.malformed == count)  # type: ignore[misc]
            peer.socket.close()
        assert (both.target.data[1:] == then[1:]).all()
        assert both.send("x", (0, 100, 10)).error is None and both.b.receiver_counters.accepted == len(bad) + 1


def test_garbage_instead_of_a_greeting_is_counted_and_closed() -> None:
    with pair("tcp") as both:
        for seed in range(20):
            peer = Raw(both.b.endpoint(), greet=False)
            peer.socket.sendall(random.Random(seed).randbytes(HELLO.size + seed))
            assert peer.closed()
        assert both.b.receiver_counters.malformed == 20
        for hello in (HELLO.pack(MAGIC, VERSION, bytes(16), bytes(16)), HELLO.pack(MAGIC, 99, bytes(16), bytes(16))):
            peer = Raw(both.b.endpoint(), greet=False)
            peer.socket.sendall(hello)
            assert WELCOME.unpack(peer.take(WELCOME.size))[2] != WELCOMED and peer.closed()
        assert both.b.receiver_counters.strangers == 2


def test_who_asks_for_shared_memory_can_fill_neither_descriptors_nor_memory() -> None:
    target = Memory("memory", MIB)
    name = decode_endpoint(target.engine.endpoint()).memory
    before = len(os.listdir("/proc/self/fd"))
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(20)]
    for stranger in strangers:
        stranger.connect(f"\0{name}")
        stranger.settimeout(20)
        descriptors = [stranger.fileno()] * 100
        socket.send_fds(stranger, [b"\x20\0\0"], descriptors)  # of a length, so that it has to be kept
    time.sleep(0.2)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * len(strangers), "both ends of each"
    for stranger in strangers:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"\x7f")  # ... which is then 2 GiB
            assert stranger.recv(1) == b""
        stranger.close()
    target.close()


def test_another_user_is_sent_away_before_a_byte_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Memory("memory", MIB)
    name = decode_endpoint(target.engine.endpoint()).memory
    monkeypatch.setattr(stream_host.MessageSocket, "same_user", lambda self: False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(f"\0{name}")
        stranger.settimeout(2)
        assert stranger.recv(1) == b"", "without a deadline to wait for"
    target.close()


def test_half_a_greeting_and_half_a_frame_meet_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_receiver, "HELLO_DEADLINE", 0.2)
    monkeypatch.setattr(stream_receiver, "FRAME_DEADLINE", 0.2)
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, 4096)))
        assert both.send("x", (0, 0, 10)).error is None
        mute = Raw(both.b.endpoint(), greet=False)
        mute.socket.sendall(MAGIC)
        halves = [Raw(both.b.endpoint()) for _ in range(3)]
        whole = frame("x", 1, (both.target.address + 100, 100)) + bytes(100)
        for peer, size in zip(halves, (1, 30, len(whole) - 1), strict=True):
            peer.socket.sendall(whole[:size])
        assert mute.closed() and all(peer.closed() for peer in halves)
        assert both.b.receiver_counters.silent == 1 and both.b.receiver_counters.stalled == 3
        assert both.send("x", (0, 0, 10)).error is None, "those between frames may rest"
        assert both.b.receiver_counters.accepted == 5


def test_connections_are_bounded_and_newcomers_do_not_push_out_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_receiver, "STRANGERS", 8)
    monkeypatch.setattr(stream_receiver, "PEERS", 3)
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, 4096)))
        assert both.send("x", (0, 0, 10)).error is None
        strangers = [Raw(both.b.endpoint(), greet=False) for _ in range(30)]
        until(lambda: both.b.receiver_counters.accepted == 31)
        assert all(peer.closed() for peer in strangers[:22])
        assert both.b.receiver_counters.turned_away == 22
        peers = [Raw(both.b.endpoint()) for _ in range(2)]
        with pytest.raises(AssertionError):
            Raw(both.b.endpoint())
        assert both.send("x", (0, 0, 10)).error is None
        for peer in [*strangers, *peers]:
            peer.socket.close()


def test_a_peer_that_reads_no_verdicts_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_receiver, "UNREAD_VERDICTS", 1 << 12)

    def small(one: socket.socket) -> None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(stream_receiver, "keep_alive", small)  # which would cut it too, later
    with pair("tcp") as both:
        peer = Raw(both.b.endpoint())
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        refused = b"".join(frame("x", sequence, (both.target.address, 1)) + b"a" for sequence in range(20_000))
        with contextlib.suppress(ConnectionError):
            peer.socket.sendall(refused)
        until(lambda: both.b.receiver_counters.stalled == 1)


# ---- what it costs, and what it leaves


@pytest.mark.parametrize("path", PATHS)
def test_an_idle_engine_does_not_wake_up(path: str) -> None:
    with pair(path) as both:
        both.b.grant("x", both.areas((0, MIB)))
        assert both.send("x", (0, 0, MIB)).error is None
        time.sleep(0.1)
        threads = [both.a._thread, both.b._thread]

        def switches() -> list[str]:
            status = [Path(f"/proc/self/task/{one.native_id}/status").read_text() for one in threads]
            return [line for text in status for line in text.splitlines() if line.startswith("voluntary")]

        before, clocks = switches(), [time.pthread_getcpuclockid(one.ident) for one in threads]
        used = [time.clock_gettime(clock) for clock in clocks]
        time.sleep(0.5)
        assert switches() == before
        assert [time.clock_gettime(clock) for clock in clocks] == used


@pytest.mark.parametrize("path", PATHS)
def test_a_closed_engine_leaves_no_descriptor_and_no_thread(path: str) -> None:
    def descriptors() -> set[tuple[str, str]]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        return found

    before, threads = descriptors(), threading.active_count()
    both = Pair(path)
    both.b.grant("x", both.areas((0, MIB)))
    assert both.send("x", (0, 0, MIB)).error is None
    raw = Raw(both.b.endpoint())
    both.a.submit(99, "b", both.writes((0, 0, 4 * MIB)), "x")
    both.close()
    raw.socket.close()
    assert [one.handle for one in both.a.poll()] == [99], "it ends all the same"
    both.a.submit(100, "b", [], "x")  # of no effect, and no harm
    assert both.a.close()
    del both, raw
    assert {name for _, name in descriptors() - before if not name.startswith("/memfd:test")} == set()
    assert threading.active_count() == threads


def test_the_backend_is_chosen_by_name() -> None:
    engine = make_engine("stream", HOST)
    assert engine.name == "stream" and len(engine.endpoint()) < 1024
    assert engine.close()
    with pytest.raises(EngineError, match="cannot listen"):
        StreamEngine("192.0.2.1", 20.0)


# ---- the other process


def _send(endpoint: str, address: str, nbytes: str) -> None:
    """Writes all of the target again and again; says how each ended."""
    source = Memory("tcp", int(nbytes), fill=0xAB)
    source.engine.connect("b", endpoint.encode())
    for handle in range(10**6):
        source.engine.submit(handle, "b", [(source.address, int(address), int(nbytes))], "x")
        (ended,) = wait(source.engine)
        print(ended.error or "sent", flush=True)


def _receive(path: str, nbytes: str) -> None:
    target = Memory(path, int(nbytes))
    target.engine.grant("x", [(target.address, int(nbytes))])
    print(json.dumps({"endpoint": target.engine.endpoint().decode(), "address": target.address}), flush=True)
    sys.stdin.read()


def _hold(endpoint: str) -> None:
    """Begins a copy under the lease and stops in the middle of it."""
    parsed = decode_endpoint(endpoint.encode())
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{parsed.memory}")
    messages = MessageSocket(connection, MAX_MESSAGE, 2)

    def ask(what: bytes) -> bytes:
        messages.send(what)
        while not (heard := messages.receive()):
            assert heard is not None
            select.select([connection], [], [])
        return heard[0]

    ask(HELLO.pack(MAGIC, VERSION, bytes.fromhex(parsed.incarnation), bytes(16)))
    table = LeaseTableView(messages.descriptors[0])
    _, granted, slot, nonce = ANSWER.unpack_from(ask(b"x"))
    assert granted and table.enter(slot, nonce)
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    # The other process must not outlive the test.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    roles: dict[str, Callable[..., None]] = {"send": _send, "receive": _receive, "hold": _hold}
    roles[sys.argv[1]](*sys.argv[2:])
