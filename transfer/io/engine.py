"""The engine that moves bytes: one per rank process, chosen by name.

In: regions to register once, peers to reach, lists of (source, destination, bytes).
Out: per handle exactly one completion, and a second one if a handle of unknown fate
ends after all. A prefill rank submits; a decode rank only registers and is written to.

Invariants: no call blocks its caller except those of the start (`register`, `endpoint`);
`completion_fd` is readable whenever `poll()` has something; an error is not proof that
nothing lands any more unless it says `quiet`; choosing one backend imports no other.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..handshake import unspecified
from ..regions import Write

log = logging.getLogger(__name__)

BACKENDS = ("mooncake", "nixl", "stream", "local")


class EngineError(RuntimeError):
    """The backend is missing, or will not start, or refused a region."""


@dataclass(frozen=True, slots=True)
class Completion:
    """`error` None: the bytes are at the target. `quiet`: nothing of the handle was ever started."""

    handle: int
    error: str | None = None
    quiet: bool = False


@dataclass(slots=True)
class EngineCounters:
    """Of one engine; `add` sums them up over those that a rank has had."""

    bytes_submitted: int = 0
    bytes_done: int = 0  # by the library's own completions
    handles_submitted: int = 0
    handles_done: int = 0
    handles_failed: int = 0
    handles_unknown: int = 0  # past their deadline: reported, still watched
    writes_done: int = 0

    def add(self, other: EngineCounters) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class TransferEngine(Protocol):
    name: str
    counters: EngineCounters

    @property
    def completion_fd(self) -> int: ...
    @property
    def handles_outstanding(self) -> int: ...
    def register(self, address: int, nbytes: int, descriptor: int | None = None) -> None:
        """`descriptor`: of the shared memory file that the region is a mapping of, from its first byte on."""

    def endpoint(self) -> bytes: ...
    def connect(self, peer_key: str, endpoint: bytes) -> None: ...
    def submit(self, handle: int, peer_key: str, writes: Sequence[Write], lease: str) -> None:
        """`lease`: what the peer granted the target memory under; engines that check none ignore it."""

    def poll(self) -> list[Completion]: ...
    def drop(self, peer_key: str) -> None: ...
    def close(self) -> bool:
        """True: it is destroyed, and nothing of it reads a source page any more. False: it hangs; ask again.

        What it had reported before can still be polled. May be called from another thread than the rest."""


Area = tuple[int, int]  # address, bytes


@runtime_checkable
class LeasingEngine(TransferEngine, Protocol):
    """Its target checks each chunk before a byte of it lands. Of others only the sender's word is a fence."""

    def grant(self, lease: str, areas: Sequence[Area]) -> None:
        """Peers may write into these areas of registered memory, and nowhere else, until the lease is revoked."""

    def revoke(self, handle: int, lease: str) -> None:
        """`Completion(handle)` follows once no byte can land under this lease any more. Unknown ones: at once."""


class Completions:
    """Where a backend puts what ended: a queue whose descriptor wakes the rank's loop."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: deque[Completion] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def put(self, completions: Sequence[Completion]) -> None:
        with self._lock:
            if completions and not self._closed:
                self._queue.extend(completions)
                os.eventfd_write(self.fd, 1)

    def take(self) -> list[Completion]:
        with self._lock:
            if not self._queue:
                return []
            if not self._closed:
                os.eventfd_read(self.fd)
            taken = list(self._queue)
            self._queue.clear()
            return taken

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class Outstanding:
    """Handles that were submitted and not reported yet, bounded. The caller's thread only."""

    def __init__(self, completions: Completions, counters: EngineCounters, most: int) -> None:
        self._completions, self._counters, self._most = completions, counters, most
        self._handles: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def admit(self, handle: int, writes: Sequence[Write]) -> bool:
        """False: there are too many, and it is completed as such."""
        assert handle not in self._handles, f"handle {handle} is in use"
        self._handles[handle] = None
        self._counters.handles_submitted += 1
        if len(self._handles) > self._most:
            self._completions.put([Completion(handle, "too many transfers are outstanding", quiet=True)])
            return False
        self._counters.bytes_submitted += sum(write[2] for write in writes)
        return True

    def poll(self) -> list[Completion]:
        taken = self._completions.take()
        for completion in taken:
            self._handles.pop(completion.handle, None)
        return taken

    def give_up(self, reason: str) -> list[Completion]:
        """Whatever is outstanding is of unknown fate."""
        self._counters.handles_unknown += len(self._handles)
        lost = [Completion(handle, reason) for handle in self._handles]
        self._handles.clear()
        return lost


@dataclass(frozen=True, slots=True)
class Choice:
    backend: str
    device: str  # RDMA devices, comma-separated; "" is TCP
    why: str


def choose(name: str, device: str = "", sysfs: Path = Path("/sys/class/infiniband")) -> Choice:
    """What `name` means on this host. `device` names RDMA devices (untested: no such hardware so far).

    Raises `EngineError` for a backend that there is not, and for a device that is not here, naming those that are:
    RDMA that was asked for never falls back silently.
    """
    if name not in ("auto", *BACKENDS):
        raise EngineError(f"unknown transfer backend {name!r}; there are auto, {', '.join(BACKENDS)}")
    if name == "stream" and device:
        raise EngineError(f"the stream backend has no RDMA; it cannot use {device!r}")
    present = sorted(entry.name for entry in sysfs.iterdir()) if sysfs.is_dir() else []
    for wanted in filter(None, device.split(",")):
        if wanted not in present:
            raise EngineError(f"no RDMA device {wanted!r} on this host; there are: {', '.join(present) or 'none'}")
    if name != "auto":
        return Choice(name, device, "as configured")
    if device or present:
        return Choice("mooncake", device or ",".join(present), "auto: this host has RDMA devices")
    why = "auto: no RDMA device; of those over TCP it is the fastest, and its targets check each write"
    return Choice("stream", "", why)


def require_local(host: str) -> None:
    """Raises `EngineError` for an address at which no peer would find us. Not every library notices by itself."""
    if unspecified(host):
        raise EngineError(f"the transfer engine needs an address that peers can reach, not {host!r}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        raise EngineError(f"the transfer engine needs an address of this host, and {host} is none: {error}") from None


def make_engine(
    name: str, host: str, device: str = "", handle_deadline: float = 20.0, key: bytes | None = None
) -> TransferEngine:
    """`host` is the address that peers reach; `handle_deadline` seconds without an end make a write unknown.
    Where the backend can, its peers must prove that they know the `key`.

    Raises `EngineError`, also as `choose` does.
    """
    choice = choose(name, device)
    chosen, device = choice.backend, choice.device
    require_local(host)
    log.info("transfer backend %s over %s on %s (%s)", chosen, device or "tcp", host, choice.why)
    if chosen == "local":
        from .local import LocalEngine

        return LocalEngine()
    if chosen == "stream":
        from .stream.engine import StreamEngine

        return StreamEngine(host, handle_deadline, key=key)
    from .owned_thread import Driver, OwnedThread

    driver: Driver
    if chosen == "mooncake":
        from .mooncake import MooncakeDriver

        driver = MooncakeDriver(host, device, handle_deadline)
    else:
        from .nixl import NixlDriver

        driver = NixlDriver(host, device, handle_deadline)
    return OwnedThread(driver, handle_deadline)
