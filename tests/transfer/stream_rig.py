"""A pair of `stream` engines, a bare connection to one, and an engine in another process.

Run as a program, this file is the other process: `send`, `receive` or `hold`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy
from numpy.typing import NDArray

from transfer.io.engine import Completion
from transfer.io.stream.engine import StreamEngine
from transfer.io.stream.fence import LeaseTableView
from transfer.io.stream.host import ANSWER, MAX_MESSAGE, MessageSocket
from transfer.io.stream.wire import (
    HELLO,
    MAGIC,
    VERDICT,
    VERSION,
    WELCOME,
    WELCOMED,
    decode_endpoint,
    take_verdicts,
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
