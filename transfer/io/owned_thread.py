"""One thread that owns a library: every call of it is made there and nowhere else.

In: the engine calls of the rank's loop, queued. Out: completions through an eventfd.
Asleep without a timer while nothing is outstanding; while something is, it asks the
library every 0.2 ms, backing off to 1 ms as long as nothing ends.

A library may keep the thread in one call for a minute or for ever, for a peer that stands still,
and the driver's deadlines stand still with it. So the caller's thread looks at how long the call
takes: past a bound all that is outstanding is of unknown fate, which leads to another engine, on
another thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

from ..regions import Write
from .engine import Completion, Completions, EngineCounters, EngineError, Outstanding

log = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT = 120.0
CLOSE_TIMEOUT = 10.0
FASTEST, SLOWEST = 0.0002, 0.001


class Driver(Protocol):
    """A library, single-threaded. No call of it may wait for a peer longer than its own bound."""

    name: str
    counters: EngineCounters

    def open(self) -> None: ...
    def register(self, address: int, nbytes: int) -> None: ...
    def endpoint(self) -> bytes: ...
    def connect(self, peer_key: str, endpoint: bytes) -> None: ...
    def begin(self, handle: int, peer_key: str, writes: Sequence[Write]) -> list[Completion]: ...
    def advance(self) -> list[Completion]: ...
    def outstanding(self) -> bool: ...
    def drop(self, peer_key: str) -> None: ...
    def close(self) -> None:
        """Raises if the library's engine is not destroyed afterwards."""


class OwnedThread:
    """A `TransferEngine` around a driver."""

    def __init__(self, driver: Driver, longest_call: float = 20.0, max_handles: int = 4096) -> None:
        self.name = driver.name
        self.counters = driver.counters
        self._driver = driver
        self._longest_call = longest_call
        self._entered = 0.0  # when the call that the thread is in began
        self._completions = Completions()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outstanding = Outstanding(self._completions, self.counters, max_handles)
        self._destroyed = False
        self._thread = threading.Thread(target=self._run, name=f"transfer-{driver.name}", daemon=True)
        self._thread.start()
        try:
            self._ask(driver.open)
        except BaseException:
            self.close()
            raise

    @property
    def completion_fd(self) -> int:
        return self._completions.fd

    @property
    def handles_outstanding(self) -> int:
        return len(self._outstanding)

    # ---- the start: these wait for the thread

    def register(self, address: int, nbytes: int, descriptor: int | None = None) -> None:
        self._ask(lambda: self._driver.register(address, nbytes))

    def endpoint(self) -> bytes:
        return self._ask(self._driver.endpoint)

    # ---- afterwards: these do not

    def connect(self, peer_key: str, endpoint: bytes) -> None:
        self._commands.put(lambda: self._driver.connect(peer_key, endpoint))

    def submit(self, handle: int, peer_key: str, writes: Sequence[Write], lease: str) -> None:
        if self._outstanding.admit(handle, writes):
            self._commands.put(lambda: self._begin(handle, peer_key, writes))

    def poll(self) -> list[Completion]:
        taken = self._outstanding.poll()
        entered = self._entered
        if entered and self._outstanding and time.monotonic() - entered > self._longest_call:
            reason = f"{self.name} has been in one call for {self._longest_call:.0f} s"
            log.error("%s: %d transfers are of unknown fate", reason, len(self._outstanding))
            taken += self._outstanding.give_up(reason)
        return taken

    def drop(self, peer_key: str) -> None:
        self._commands.put(lambda: self._driver.drop(peer_key))

    def close(self) -> bool:
        """Destroys the library's engine. Bounded: a library that hangs is left behind, and False says so."""
        self._commands.put(None)
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            log.error("%s did not close within %.0f s", self.name, CLOSE_TIMEOUT)
        self._completions.close()
        return self._destroyed

    # ---- inside

    def _ask(self, call: Callable[[], T]) -> T:
        """Run on the thread, wait for the answer."""
        answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(), None))
            except Exception as error:
                answers.put((None, error))

        self._commands.put(run)
        try:
            answer, error = answers.get(timeout=START_TIMEOUT)
        except queue.Empty:
            raise EngineError(f"{self.name} did not answer within {START_TIMEOUT:.0f} s") from None
        if error is not None:
            raise error
        return cast(T, answer)

    def _run(self) -> None:
        wait = FASTEST
        while True:
            try:
                command = self._commands.get(timeout=wait if self._driver.outstanding() else None)
                if command is None:
                    break
                self._guarded(command)
                wait = FASTEST
                if not self._commands.empty():
                    continue
            except queue.Empty:
                wait = min(wait * 1.5, SLOWEST)
            before = self.counters.writes_done
            self._guarded(lambda: self._completions.put(self._driver.advance()))
            if self.counters.writes_done != before:
                wait = FASTEST
        self._guarded(self._end)

    def _end(self) -> None:
        self._driver.close()
        self._destroyed = True

    def _begin(self, handle: int, peer_key: str, writes: Sequence[Write]) -> None:
        try:
            ended = self._driver.begin(handle, peer_key, writes)
        except Exception as error:
            log.exception("%s: could not begin handle %d", self.name, handle)
            ended = [Completion(handle, f"{self.name}: {error}")]
        self._completions.put(ended)

    def _guarded(self, call: Callable[[], None]) -> None:
        """A driver reports what goes wrong with a handle; whatever else it raises must not end the thread."""
        self._entered = time.monotonic()
        try:
            call()
        except Exception:
            log.exception("%s: a library call failed", self.name)
        self._entered = 0.0
