"""The sending engine of a rank, and its replacement by a new one.

In: the engine, a factory for others (started, the pool registered), moments. Out: completions of every
engine that lives, and what happened to them as events.

The new engine is started first and serves at once; the old one gets `drain` seconds for its healthy
handles and is then destroyed, both on a helper thread, so that the rank's loop never waits. Two engines in
one process may register the same memory and write at the same time. Where the second one does not start
(ports, locked memory), the old one is destroyed first, and meanwhile there is none: `engine` is None, with
a `reason` once a start failed. One replacement at a time, and each further one later: see `Backoff`.
Invariant: `Destroyed` is said only when the library's engine is gone, however long that takes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..replacement import Backoff, ReplacementLimits, Suspects
from .engine import Completion, EngineCounters, TransferEngine
from .owned_thread import CLOSE_TIMEOUT

log = logging.getLogger(__name__)

EngineFactory = Callable[[], TransferEngine]

TRIES_BESIDE = 2  # starts beside the old engine that may fail before it makes room


@dataclass(frozen=True, slots=True)
class Starting:
    """A new engine is on its way: find out which peers would answer it."""


@dataclass(frozen=True, slots=True)
class Retired:
    """The engine gets nothing more; its successor is there, or will be."""


@dataclass(frozen=True, slots=True)
class Started:
    """`engine` is another one, and knows no peer."""


@dataclass(frozen=True, slots=True)
class Destroyed:
    """The retired engine is gone. These had ended before."""

    completions: list[Completion]


SlotEvent = Starting | Retired | Started | Destroyed


@dataclass(slots=True)
class _Serving:
    engine: TransferEngine
    suspects: Suspects = field(default_factory=Suspects)
    drained_by: float = 0.0
    leaving: bool = False  # with the helper


class EngineSlot:
    def __init__(self, engine: TransferEngine, factory: EngineFactory | None, limits: ReplacementLimits) -> None:
        self.replacements = 0
        self.reason = ""  # why there is no engine
        self.latest = engine
        self._limits, self._factory = limits, factory
        self._current: _Serving | None = _Serving(engine)
        self._old: _Serving | None = None
        self._backoff = Backoff(limits.backoff, limits.backoff_most)
        self._failures = 0  # starts in a row
        self._past = EngineCounters()
        self._results: queue.SimpleQueue[TransferEngine | Exception | None] = queue.SimpleQueue()
        self._helper: threading.Thread | None = None
        self._busy = False
        self._closing = threading.Event()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # ---- for the loop

    @property
    def engine(self) -> TransferEngine | None:
        return None if self._current is None else self._current.engine

    def descriptors(self) -> tuple[int, ...]:
        return (self._wakeup, *(one.engine.completion_fd for one in self._alive()))

    def poll(self, now: float) -> list[Completion]:
        ended: list[Completion] = []
        for one in self._alive():
            for completion in one.engine.poll():
                one.suspects.ended(completion.handle, completion.error, completion.quiet, now)
                ended.append(completion)
        return ended

    def step(self, now: float) -> list[SlotEvent]:
        """What became of the helper's work, and the next thing to do, if it is time."""
        events: list[SlotEvent] = []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        while not self._results.empty():
            events += self._on_result(self._results.get(), now)
        if self._busy or self._factory is None:
            return events
        old, current = self._old, self._current
        if old is not None:
            if old.engine.handles_outstanding == 0 or now >= old.drained_by:
                old.leaving = True
                self._help(lambda: self._destroy(old.engine))
        elif current is None:
            if self._backoff.ready(now):
                events.append(self._start())
        elif current.suspects.age(now) >= self._limits.replace_after and self._backoff.ready(now):
            count, reason = len(current.suspects), current.suspects.reason
            log.warning("replacing the transfer engine: %d handles of unknown fate, first: %s", count, reason)
            if self._failures < TRIES_BESIDE:
                events.append(self._start())
            else:
                events.append(self._retire(current, now))
        return events

    # ---- for the status

    @property
    def handles_outstanding(self) -> int:
        return sum(one.engine.handles_outstanding for one in (self._current, self._old) if one is not None)

    def counters(self) -> EngineCounters:
        """Of all engines this rank has had."""
        total = EngineCounters()
        total.add(self._past)
        for one in (self._current, self._old):
            if one is not None:
                total.add(one.engine.counters)
        return total

    def drop(self, peer_key: str) -> None:
        for one in self._alive():
            one.engine.drop(peer_key)

    def close(self) -> None:
        """Destroys all engines. Bounded."""
        self._closing.set()
        if self._helper is not None:
            self._helper.join(2 * CLOSE_TIMEOUT)
        for one in self._alive():
            one.engine.close()
        while not self._results.empty():
            started = self._results.get()
            if started is not None and not isinstance(started, Exception):
                started.close()
        if self._helper is None or not self._helper.is_alive():
            os.close(self._wakeup)

    # ---- inside

    def _alive(self) -> list[_Serving]:
        return [one for one in (self._current, self._old) if one is not None and not one.leaving]

    def _on_result(self, result: TransferEngine | Exception | None, now: float) -> list[SlotEvent]:
        self._busy = False
        if result is None:
            assert self._old is not None
            old, self._old = self._old.engine, None
            self._past.add(old.counters)
            log.warning("the old transfer engine is destroyed")
            return [Destroyed(old.poll())]
        self._backoff.used(now)
        if isinstance(result, Exception):
            self._failures += 1
            log.error("no new transfer engine, next try in %.0f s: %s", self._backoff.wait, result)
            if self._current is None:
                self.reason = f"the transfer engine does not start: {result}"
            return []
        events: list[SlotEvent] = [] if self._current is None else [self._retire(self._current, now)]
        self._current, self.latest, self._failures, self.reason = _Serving(result), result, 0, ""
        self.replacements += 1
        log.warning("a new transfer engine serves, replacement %d", self.replacements)
        return [*events, Started()]

    def _retire(self, current: _Serving, now: float) -> Retired:
        assert self._old is None
        current.drained_by = now + self._limits.drain
        self._old, self._current = current, None
        return Retired()

    def _start(self) -> Starting:
        factory = self._factory
        assert factory is not None
        self._help(factory)
        return Starting()

    def _help(self, work: Callable[[], TransferEngine | None]) -> None:
        def run() -> None:
            result: TransferEngine | Exception | None
            try:
                result = work()
            except Exception as error:
                result = error
            self._results.put(result)
            os.eventfd_write(self._wakeup, 1)

        self._busy = True
        self._helper = threading.Thread(target=run, name="transfer-replacement", daemon=True)
        self._helper.start()

    def _destroy(self, engine: TransferEngine) -> None:
        """Returns when it is gone. One that hangs keeps its pages: nothing but its end proves anything."""
        while not self._closing.is_set():
            try:
                if engine.close():
                    return
            except Exception:
                log.exception("the old transfer engine cannot be closed")
            time.sleep(1.0)
