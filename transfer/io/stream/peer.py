"""One peer of a `stream` engine's sending half: what is on its way there, and by which path.

In: transfers. Out: exactly one end of each.

Invariants: on the same host shared memory is tried first, and TCP only takes over before anything was sent;
a path that broke takes all its transfers with it, and the next transfer opens another; a peer whose oldest
transfer makes no end within the deadline loses its path.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from .loop import Alarm, Loop
from .memory import MemoryPath
from .tcp import TcpPath
from .transfer import Ended, Path, Transfer
from .wire import Endpoint

log = logging.getLogger(__name__)

RETRY_PAUSE = 0.5  # after a path that was never ready


@dataclass(frozen=True, slots=True)
class Here:
    """What this engine is to all its peers."""

    loop: Loop
    key: bytes | None  # that peers must know, and prove to know
    boot: str  # of this host; "" to share no memory
    deadline: float
    ended: Ended


class Peer:
    def __init__(self, here: Here, endpoint: bytes, parsed: Endpoint | str) -> None:
        """`parsed`: or why it could not be."""
        self.endpoint = endpoint
        self._here = here
        self._parsed = parsed
        self._hopeless = parsed if isinstance(parsed, str) else ""
        self._outstanding: dict[int, Transfer] = {}  # oldest first
        self._path: Path | None = None
        self._by_memory = False
        self._reason, self._not_before = "", 0.0
        self._deadline = Alarm(here.loop, self._late)

    def open(self) -> None:
        """First contact, so that the first transfer need not wait for it."""
        if self._path is None and not self._hopeless:
            self._open(by_memory=True)

    def send(self, transfer: Transfer) -> None:
        if self._path is None and not self._hopeless and time.monotonic() >= self._not_before:
            self._open(by_memory=True)
        if self._path is None:
            self._here.ended(transfer, self._hopeless or self._reason)
            return
        if not self._outstanding:
            self._deadline.set(time.monotonic() + self._here.deadline)
        self._outstanding[transfer.handle] = transfer
        self._path.send(transfer)

    def close(self, reason: str) -> None:
        self._drop_path()
        self._fail_all(reason)

    # ---- inside

    def _open(self, by_memory: bool) -> None:
        endpoint, here = self._parsed, self._here
        assert isinstance(endpoint, Endpoint)
        self._by_memory = by_memory and bool(endpoint.memory) and endpoint.boot == here.boot != ""
        self._path = (
            MemoryPath(here.loop, endpoint, self._on_ended, self._on_broken)  # the kernel says whose user it is
            if self._by_memory
            else TcpPath(here.loop, endpoint, here.key, self._on_ended, self._on_broken)
        )
        try:
            self._path.open()
        except OSError as error:
            self._on_broken(f"cannot reach the peer: {error.strerror or error}", False)

    def _on_ended(self, transfer: Transfer, error: str | None) -> None:
        del self._outstanding[transfer.handle]
        if self._outstanding:
            self._deadline.set(time.monotonic() + self._here.deadline)
        else:
            self._deadline.off()
        self._here.ended(transfer, error)

    def _on_broken(self, reason: str, final: bool) -> None:
        path, by_memory = self._path, self._by_memory
        assert path is not None
        self._path = None
        if by_memory and not path.ready:
            log.info("stream: no shared memory with a peer on this host (%s); using TCP", reason)
            self._open(by_memory=False)
            if self._path is not None:
                for transfer in self._outstanding.values():
                    transfer.restart()
                    self._path.send(transfer)
            return
        if final:
            self._hopeless = reason
        self._reason = reason
        self._not_before = 0.0 if path.ready else time.monotonic() + RETRY_PAUSE
        self._fail_all(reason)

    def _late(self) -> None:
        ready = self._path is not None and self._path.ready
        self._drop_path()
        if not ready:
            self._not_before = time.monotonic() + RETRY_PAUSE
        self._reason = f"no answer of the peer within {self._here.deadline:g} s"
        self._fail_all(self._reason)

    def _drop_path(self) -> None:
        if self._path is not None:
            self._path.close()
            self._path = None

    def _fail_all(self, reason: str) -> None:
        self._deadline.off()
        failed, self._outstanding = self._outstanding, {}
        for transfer in failed.values():
            self._here.ended(transfer, reason)
