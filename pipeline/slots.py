"""Microbatch slots: how many batches are in flight, and which.

A tick occupies one slot from its launch to its harvest. Ticks are numbered from 1, launched in order,
and harvested in the same order: the executor and the return link are FIFO.
"""

from __future__ import annotations

from collections import deque

from pipeline.planner import Batch


class Slots:
    """`count` slots, all free at first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._flight: deque[Batch] = deque()
        self.next_tick = 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_flight(self) -> int:
        return len(self._flight)

    def first_free(self) -> int | None:
        return self._free[0] if self._free else None

    def launch(self, batch: Batch) -> None:
        assert batch.tick == self.next_tick and batch.slot in self._free
        self._free.remove(batch.slot)
        self._flight.append(batch)
        self.next_tick += 1

    def harvest(self, tick: int) -> Batch:
        """Ends the oldest tick in flight, which must be `tick`; frees its slot."""
        assert self._flight and self._flight[0].tick == tick, f"tick {tick} returned out of order"
        batch = self._flight.popleft()
        self._free.append(batch.slot)
        self._free.sort()
        return batch
