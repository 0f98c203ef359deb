"""Faults that a test plants under a sending port: writes that wait, fail, or arrive damaged; connections that break."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence

from transfer.io.engine import Completion, TransferEngine
from transfer.regions import Write


class FaultyEngine:
    """A real engine whose writes a test can hold up, fail, or damage after they have landed.

    Damage needs the target in this process. What it says itself wakes nobody: the loops here poll anyhow."""

    def __init__(self, engine: TransferEngine) -> None:
        self.inner, self.name, self.counters = engine, engine.name, engine.counters
        self.holding = False
        self.held: list[tuple[int, str, Sequence[Write], str]] = []
        self.failures: deque[Completion] = deque()  # for the next writes; the handle is filled in
        self.failed: list[int] = []  # their handles
        self.flips = 0  # of the next writes, those of which one bit is damaged
        self.registrations = 0
        self._own: list[Completion] = []
        self._flying: dict[int, Sequence[Write]] = {}

    @property
    def completion_fd(self) -> int:
        return self.inner.completion_fd

    @property
    def handles_outstanding(self) -> int:
        return self.inner.handles_outstanding + len(self.held) + len(self._own)

    def release(self) -> None:
        """What was held goes on its way."""
        self.holding = False
        held, self.held = self.held, []
        for one in held:
            self.submit(*one)

    def end_well(self, handle: int) -> None:
        """A write that had failed has landed after all, or never began."""
        self._own.append(Completion(handle))

    def register(self, address: int, nbytes: int, descriptor: int | None = None) -> None:
        self.registrations += 1
        self.inner.register(address, nbytes, descriptor)

    def endpoint(self) -> bytes:
        return self.inner.endpoint()

    def connect(self, peer_key: str, endpoint: bytes) -> None:
        self.inner.connect(peer_key, endpoint)

    def submit(self, handle: int, peer_key: str, writes: Sequence[Write], lease: str) -> None:
        if self.failures:
            planted = self.failures.popleft()
            self.failed.append(handle)
            self._own.append(Completion(handle, planted.error, planted.quiet))
        elif self.holding:
            self.held.append((handle, peer_key, writes, lease))
        else:
            self._flying[handle] = writes
            self.inner.submit(handle, peer_key, writes, lease)

    def poll(self) -> list[Completion]:
        ended, self._own = self.inner.poll() + self._own, []
        for one in ended:
            writes = self._flying.pop(one.handle, ())
            if writes and one.error is None and self.flips:
                self.flips -= 1
                ctypes.c_ubyte.from_address(writes[-1][1] + writes[-1][2] // 2).value ^= 0x10
        return ended

    def drop(self, peer_key: str) -> None:
        self.inner.drop(peer_key)

    def close(self) -> bool:
        return self.inner.close()


def sockets() -> dict[str, int]:
    """This process's, by what the system calls them, with one descriptor of each."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{descriptor}")).startswith("socket:"):
                found[name] = int(descriptor)
    return found


def cut(names: Iterable[str]) -> int:
    """Break these connections, both ends of which may be here. How many there were."""
    broken = 0
    open_ones = sockets()
    for name in names:
        with contextlib.suppress(OSError, KeyError):
            with socket.socket(fileno=os.dup(open_ones[name])) as one:
                one.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken
