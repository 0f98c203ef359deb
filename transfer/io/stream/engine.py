"""Our own engine: KV over plain TCP straight into the target's pool, or through shared memory on one host.

In: the engine calls of the rank's loop. Out: completions through an eventfd. One thread (`loop`)
does both halves: it receives for the leases that were granted here (`receiver`, `host`) and
sends to peers (`peer`, by `memory` or `tcp`). The two halves of a connection speak
`wire`.

Invariants: nothing lands but under a lease, inside its areas; once a revoke is completed, nothing lands
under that lease, whatever became of the sender; each handle has exactly one completion, and is completed
without an error only when the target has all of it. No call blocks but `register`, `endpoint`, `close`;
idle, the thread sleeps without a timer.

Every error of a transfer is `quiet`. Its source pages are not read any more: what the kernel still holds
are copies, and no frame is left half sent on a connection that stays. Its target pages may still receive
what the kernel holds, as long as the lease stands; that is what the target's revoke is for, and the
sender's engine need not be replaced.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...regions import Write
from ..engine import Area, Completion, Completions, EngineCounters, EngineError, Outstanding
from .areas import Areas, Lease
from .fence import require_sealed, seal
from .host import MAX_REGIONS, MemoryHost
from .loop import Loop
from .peer import Here, Peer
from .receiver import Receiver, ReceiverCounters
from .transfer import Transfer
from .wire import (
    INCARNATION_BYTES,
    MAX_LEASE,
    Endpoint,
    Malformed,
    boot_id,
    decode_endpoint,
    encode_endpoint,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT = 30.0
CLOSE_TIMEOUT = 8.0
QUIET_PAUSE = 0.02


class StreamEngine:
    """A `LeasingEngine`."""

    name = "stream"

    def __init__(
        self,
        host: str,
        handle_deadline: float,
        shared_memory: bool = True,
        max_handles: int = 4096,
        key: bytes | None = None,
    ) -> None:
        """Listens on a free port of `host`. `shared_memory`: offer and use it. Over TCP only with peers that know
        the `key`, if there is one. Raises `EngineError`."""
        self.counters = EngineCounters()
        self._completions = Completions()
        self._outstanding = Outstanding(self._completions, self.counters, max_handles)
        self._incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self._boot = boot_id() if shared_memory else ""
        self._areas: list[Area] = []
        self._shared: list[tuple[int, int, int]] = []  # address, bytes, our descriptor
        self._registered = Areas(())  # replaced, never changed: both threads read it
        # Granted on the caller's thread, so that no frame of a peer that was told of it can come too early.
        self._leases: dict[bytes, Lease] = {}
        self._fences: dict[Lease, list[int]] = {}  # under way, and whom to tell
        self._peers: dict[str, Peer] = {}
        self._memory: MemoryHost | None = None
        self._loop = Loop()
        try:
            self._host = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
            self._receiver = Receiver(self._loop, str(self._host), self._incarnation, self._leases, key)
        except OSError as error:
            self._loop.close()
            self._completions.close()
            raise EngineError(f"the stream engine cannot listen on {host}: {error}") from None
        self._here = Here(self._loop, key, self._boot, handle_deadline, self._ended)
        self._thread = threading.Thread(target=self._run, name="transfer-stream", daemon=True)
        self._thread.start()

    @property
    def completion_fd(self) -> int:
        return self._completions.fd

    @property
    def handles_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def receiver_counters(self) -> ReceiverCounters:
        """Of what peers sent here, and of connections that were not let in."""
        return self._receiver.counters

    # ---- the start

    def register(self, address: int, nbytes: int, descriptor: int | None = None) -> None:
        """Memory that may be sent from and granted. The `descriptor` stays the caller's; its file is sealed."""
        if self._memory is not None:
            raise EngineError("regions are registered before the endpoint is told")
        try:
            registered = Areas([*self._areas, (address, nbytes)])
            if descriptor is not None and self._boot:
                seal(descriptor)
                require_sealed(descriptor, nbytes)
                self._shared.append((address, nbytes, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)))
        except (ValueError, OSError) as error:
            raise EngineError(f"no region: {nbytes} bytes at {address:#x}: {error}") from None
        self._areas.append((address, nbytes))
        self._registered = registered

    def endpoint(self) -> bytes:
        """Shared memory is offered if all regions lie in some and the host can fence it. Without it peers use TCP."""
        offered = 0 < len(self._shared) == len(self._areas) and len(self._shared) <= MAX_REGIONS
        name = f"paceline-stream-{self._incarnation.hex()}"
        if offered and self._memory is None:
            self._memory = self._ask(lambda: self._offer(name))
        memory = name if self._memory is not None else ""
        return encode_endpoint(
            Endpoint(str(self._host), self._receiver.port, self._incarnation.hex(), self._boot, memory)
        )

    def _offer(self, name: str) -> MemoryHost | None:
        try:
            return MemoryHost(self._loop, name, self._incarnation, self._leases, self._shared)
        except OSError as error:
            log.warning("stream: no shared memory for peers on this host, they use TCP: %s", error)
            return None

    # ---- the target's half

    def grant(self, lease: str, areas: Sequence[Area]) -> None:
        """From now on. Raises `EngineError` for memory that is not registered, or a lease that stands already."""
        name = lease.encode()
        if not 1 <= len(name) <= MAX_LEASE or name in self._leases:
            raise EngineError(f"lease {lease[:80]!r} is granted already, or no name for one")
        try:
            granted = Areas(areas)
        except ValueError as error:
            raise EngineError(f"lease {lease!r}: {error}") from None
        if len(granted.starts) and not self._registered.cover(granted.starts, granted.ends - granted.starts):
            raise EngineError(f"lease {lease!r} leaves the registered memory")
        self._leases[name] = Lease(name, granted)

    def revoke(self, handle: int, lease: str) -> None:
        """From now on no frame and no copy begins under it; completed when none is under way any more."""
        name = lease.encode()
        revoked = self._leases.pop(name, None)
        self._loop.call(lambda: self._fence(handle, name, revoked))

    # ---- the sender's half

    def connect(self, peer_key: str, endpoint: bytes) -> None:
        self._loop.call(lambda: self._connect(peer_key, endpoint))

    def submit(self, handle: int, peer_key: str, writes: Sequence[Write], lease: str) -> None:
        if self._outstanding.admit(handle, writes):
            self._loop.call(lambda: self._begin(handle, peer_key, writes, lease))

    def poll(self) -> list[Completion]:
        return self._outstanding.poll()

    def drop(self, peer_key: str) -> None:
        self._loop.call(lambda: self._drop(peer_key, "the peer was dropped"))

    def close(self) -> bool:
        """False as long as a stopped process on this host is in mid copy into the pool; then its lock keeps us."""
        self._loop.call(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            log.error("stream did not close within %.0f s", CLOSE_TIMEOUT)
            return False
        self._completions.close()
        return True

    # ---- on the thread

    def _connect(self, peer_key: str, endpoint: bytes) -> None:
        known = self._peers.get(peer_key)
        if known is not None and known.endpoint == endpoint:
            return
        self._drop(peer_key, "the peer was replaced by another incarnation")
        parsed: Endpoint | str
        try:
            parsed = decode_endpoint(endpoint)
        except Malformed as error:
            parsed = str(error)
        self._peers[peer_key] = peer = Peer(self._here, endpoint, parsed)
        peer.open()

    def _drop(self, peer_key: str, reason: str) -> None:
        if (peer := self._peers.pop(peer_key, None)) is not None:
            peer.close(reason)

    def _begin(self, handle: int, peer_key: str, writes: Sequence[Write], lease: str) -> None:
        try:
            transfer = Transfer(handle, lease.encode(), writes)
        except (ValueError, OverflowError, TypeError) as error:
            self._fail(handle, f"these are no writes: {error}")
            return
        peer = self._peers.get(peer_key)
        if peer is None:
            self._fail(handle, "the peer is not connected")
        elif not 1 <= len(transfer.lease) <= MAX_LEASE:
            self._fail(handle, "a write needs a lease of the peer")
        elif not transfer.total:
            self._ended(transfer, None)
        elif not self._registered.cover(transfer.sources, transfer.lengths):
            self._fail(handle, "a write's source is not registered")
        else:
            peer.send(transfer)

    def _fail(self, handle: int, reason: str) -> None:
        self.counters.handles_failed += 1
        self._completions.put([Completion(handle, reason, quiet=True)])

    def _ended(self, transfer: Transfer, error: str | None) -> None:
        if error is not None:
            self._fail(transfer.handle, error)
            return
        self.counters.handles_done += 1
        self.counters.bytes_done += transfer.total
        self.counters.writes_done += transfer.count
        self._completions.put([Completion(transfer.handle)])

    def _fence(self, handle: int, name: bytes, revoked: Lease | None) -> None:
        if revoked is None:
            for other, handles in self._fences.items():
                if other.name == name:
                    handles.append(handle)
                    return
            self._completions.put([Completion(handle)])
            return
        self._fences[revoked] = [handle]
        self._receiver.divert(revoked)
        if self._memory is not None:
            self._memory.fence(revoked, lambda: self._fenced(revoked))
        else:
            self._fenced(revoked)

    def _fenced(self, lease: Lease) -> None:
        self._completions.put([Completion(handle) for handle in self._fences.pop(lease)])

    def _ask(self, call: Callable[[], T]) -> T:
        """Run on the thread, wait for the answer. Raises `EngineError`."""
        answers: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(),))
            except Exception as error:
                answers.put(error)

        self._loop.call(run)
        try:
            answer = answers.get(timeout=START_TIMEOUT)
        except queue.Empty:
            raise EngineError(f"stream did not answer within {START_TIMEOUT:.0f} s") from None
        if isinstance(answer, Exception):
            raise EngineError(f"stream: {answer}") from answer
        return answer[0]

    def _run(self) -> None:
        self._receiver.open()
        self._loop.run()
        for peer_key in list(self._peers):
            self._drop(peer_key, "the engine was closed")
        self._leases.clear()
        self._receiver.close()
        if self._memory is not None:
            self._memory.close()
            while not self._memory.quiet():
                time.sleep(QUIET_PAUSE)
            self._memory.release()
        for descriptor in self._shared:
            os.close(descriptor[2])
        for lease in list(self._fences):
            self._fenced(lease)
        self._loop.close()
