"""Virtual time: one queue of events, in order of time and then of scheduling.

In: callables to run at a time. Out: they run, one by one, each alone. Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from sim.case import Delays


class Violation(Exception):
    """A run broke an invariant; the message says which one and where."""


class Clock:
    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self.stopped = False
        self._order = 0
        self._queue: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, time: int, action: Callable[..., object], *args: Any) -> None:
        self._order += 1
        heappush(self._queue, (time if time > self.now else self.now, self._order, action, args))

    def after(self, delay: int, action: Callable[..., object], *args: Any) -> None:
        self._order += 1
        heappush(self._queue, (self.now + delay, self._order, action, args))

    def run(self, limit: int) -> None:
        """Runs events until one says `stop`, the queue is empty, or `limit` events have run."""
        queue, left = self._queue, limit - self.events
        while queue and left and not self.stopped:
            self.now, _, action, args = heappop(queue)
            left -= 1
            self.events += 1
            action(*args)

    def stop(self) -> None:
        self.stopped = True


class Chance:
    """The run's one source of randomness, and the delays drawn from it."""

    def __init__(self, seed: int, delays: Delays) -> None:
        self.random = Random(seed)
        self.draw = self.random.random
        self.delays = delays
        self._straggler = delays.straggler

    def between(self, bounds: tuple[int, int]) -> int:
        """Evenly in the bounds; a few stragglers take much longer."""
        least, most = bounds
        draw = self.draw
        delay = least + int(draw() * (most - least + 1))
        return delay * 20 if draw() < self._straggler else delay
