"""An engine inside one process, for tests and the simulator.

In: the same calls as any engine. Out: the same completions, in whatever order and after
whatever delay the `LocalNetwork` is told to: bytes move only in its `land`. Left alone
(`manual=False`) each handle lands when it is submitted.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..regions import Write
from .engine import Completion, Completions, EngineCounters, EngineError, Outstanding

MOST_HANDLES = 4096


@dataclass(slots=True)
class Flight:
    """A handle on its way, write by write."""

    engine: LocalEngine
    handle: int
    peer_key: str
    writes: list[Write]
    failed: bool = False  # reported already; what is left of it may still land


class LocalNetwork:
    def __init__(self, manual: bool = False, copy: Callable[[int, int, int], object] | None = None) -> None:
        """`copy(destination, source, bytes)`; by default it moves this process's memory."""
        self.manual = manual
        self.flights: list[Flight] = []
        self._copy = copy or ctypes.memmove

    def land(self, index: int, writes: int | None = None) -> None:
        """The next `writes` writes (default all) of a flight land; the last one completes its handle."""
        flight = self.flights[index]
        now = flight.writes[:writes]
        del flight.writes[: len(now)]
        for src, dst, nbytes in now:
            self._copy(dst, src, nbytes)
            flight.engine.counters.bytes_done += nbytes
            flight.engine.counters.writes_done += 1
        if not flight.writes:
            self.flights.pop(index)
            flight.engine.ended(flight.handle, None)

    def fail(self, index: int, reason: str) -> None:
        """Report a failure; like the real libraries, what is left may still land afterwards."""
        flight = self.flights[index]
        if not flight.failed:
            flight.failed = True
            flight.engine.ended(flight.handle, reason)

    def lose(self, index: int) -> None:
        """What is left of this flight never lands, and nobody is told."""
        self.flights.pop(index)


class LocalEngine:
    name = "local"

    def __init__(self, network: LocalNetwork | None = None) -> None:
        self.counters = EngineCounters()
        self.network = network or LocalNetwork()
        self._completions = Completions()
        self._endpoint = f"local/1 {os.getpid()}".encode()
        self._peers: dict[str, bytes] = {}
        self._outstanding = Outstanding(self._completions, self.counters, MOST_HANDLES)

    @property
    def completion_fd(self) -> int:
        return self._completions.fd

    @property
    def handles_outstanding(self) -> int:
        return len(self._outstanding)

    def register(self, address: int, nbytes: int, descriptor: int | None = None) -> None:
        if address == 0 or nbytes <= 0:
            raise EngineError(f"no region: {nbytes} bytes at {address:#x}")

    def endpoint(self) -> bytes:
        return self._endpoint

    def connect(self, peer_key: str, endpoint: bytes) -> None:
        if endpoint == self._endpoint:  # another process's addresses mean nothing here
            self._peers[peer_key] = endpoint

    def submit(self, handle: int, peer_key: str, writes: Sequence[Write], lease: str) -> None:
        if not self._outstanding.admit(handle, writes):
            return
        if peer_key not in self._peers:
            self._completions.put([Completion(handle, "the peer is not connected", quiet=True)])
            return
        self.network.flights.append(Flight(self, handle, peer_key, list(writes)))
        if not self.network.manual:
            self.network.land(len(self.network.flights) - 1)

    def ended(self, handle: int, reason: str | None) -> None:
        self.counters.handles_done += reason is None
        self.counters.handles_failed += reason is not None
        self._completions.put([Completion(handle, reason)])

    def poll(self) -> list[Completion]:
        return self._outstanding.poll()

    def drop(self, peer_key: str) -> None:
        self._peers.pop(peer_key, None)

    def close(self) -> bool:
        for flight in list(self.network.flights):
            if flight.engine is self:
                self.network.flights.remove(flight)
        self._completions.close()
        return True
