"""The event loop of a `stream` engine: one thread, one epoll.

In: descriptors to watch, alarms, steps of work that go on as long as there is some, and calls
from other threads. Out: the calls, all on the loop's thread.

Invariants: without work and without an alarm that is set, the thread sleeps without a timer; an
exception ends the watcher that raised it, never the thread.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

READABLE, WRITABLE = select.EPOLLIN, select.EPOLLOUT


class Watcher(Protocol):
    """Of one descriptor."""

    def on_ready(self, events: int) -> None: ...
    def abandon(self, reason: str) -> None:
        """It raised: give up the descriptor and whatever hangs on it."""


class Alarm:
    """One call at one time; setting it again moves it. Moving it later, as most do, costs an assignment."""

    def __init__(self, loop: Loop, call: Callable[[], None]) -> None:
        self.when = self.queued = math.inf  # `queued`: the time of its valid entry in the loop's heap
        self.call = call
        self._loop = loop

    def set(self, when: float) -> None:
        self.when = when
        self._loop.queue(self)

    def off(self) -> None:
        self.when = math.inf

    @property
    def is_set(self) -> bool:
        return self.when < math.inf


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, READABLE)
        self._calls: deque[Callable[[], None]] = deque()
        self._watchers: dict[int, Watcher] = {}
        self._heap: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._steps: deque[Callable[[], bool]] = deque()
        self._stopping = self._closed = False
        self._lock = threading.Lock()

    # ---- from any thread

    def call(self, what: Callable[[], None]) -> None:
        """On the loop's thread, in the order of the calls; never, once the loop is stopped."""
        with self._lock:
            if not self._closed:
                self._calls.append(what)
                os.eventfd_write(self._wakeup, 1)

    # ---- on its thread

    def watch(self, fd: int, events: int, watcher: Watcher) -> None:
        self._epoll.register(fd, events)
        self._watchers[fd] = watcher

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Before it is closed. Twice does no harm."""
        if self._watchers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def work(self, step: Callable[[], bool]) -> None:
        """Run `step` between events until it returns False."""
        self._steps.append(step)

    def stop(self) -> None:
        self._stopping = True

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopping:
            for fd, events in self._epoll.poll(self._timeout()):
                watcher = self._watchers.get(fd)
                if watcher is not None:
                    self._ready(watcher, events)
                elif fd == self._wakeup:
                    os.eventfd_read(fd)
            while self._calls:
                self._guarded(self._calls.popleft())
            self._ring()
            for _ in range(len(self._steps)):
                step = self._steps.popleft()
                if self._guarded(step):
                    self._steps.append(step)

    def close(self) -> None:
        """Once `run` has returned."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._epoll.close()
                os.close(self._wakeup)

    # ---- inside

    def queue(self, alarm: Alarm) -> None:
        if alarm.when < alarm.queued:
            alarm.queued = alarm.when
            heapq.heappush(self._heap, (alarm.when, next(self._numbers), alarm))

    def _timeout(self) -> float | None:
        if self._steps or self._calls or self._stopping:
            return 0
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].when:  # moved or switched off since it was queued
            when, _, alarm = heapq.heappop(heap)
            if when == alarm.queued:
                alarm.queued = math.inf
                self.queue(alarm)
        return max(0.0, heap[0][0] - time.monotonic()) if heap else None

    def _ring(self) -> None:
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            when, _, alarm = heapq.heappop(self._heap)
            if when != alarm.queued:
                continue
            alarm.queued = math.inf
            if alarm.when <= now:
                alarm.off()
                self._guarded(alarm.call)
            else:
                self.queue(alarm)

    def _ready(self, watcher: Watcher, events: int) -> None:
        try:
            watcher.on_ready(events)
        except Exception:
            log.exception("stream: a connection failed")
            self._guarded(lambda: watcher.abandon("an internal error"))

    def _guarded(self, call: Callable[[], bool | None]) -> bool:
        try:
            return bool(call())
        except Exception:
            log.exception("stream: a call failed")
            return False
