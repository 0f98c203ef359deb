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
        self.free_slots = list(range(count))
        self.flight: deque[Batch] = deque()
        self.next_tick = 1
        self.since = 0  # clock since when the oldest tick in flight is the one to wait for

    @property
    def free(self) -> int:
        return len(self.free_slots)

    @property
    def in_flight(self) -> int:
        return len(self.flight)

    def first_free(self) -> int | None:
        return self.free_slots[0] if self.free_slots else None

    def launch(self, batch: Batch, clock: int) -> None:
        """`clock` is the entry's, in µs."""
        assert batch.tick == self.next_tick and batch.slot in self.free_slots
        if not self.flight:
            self.since = clock
        self.free_slots.remove(batch.slot)
        self.flight.append(batch)
        self.next_tick += 1

    def harvest(self, tick: int, clock: int) -> Batch:
        """Ends the oldest tick in flight, which must be `tick`; frees its slot."""
        assert self.flight and self.flight[0].tick == tick, f"tick {tick} returned out of order"
        batch = self.flight.popleft()
        self.since = clock
        self.free_slots.append(batch.slot)
        self.free_slots.sort()
        return batch
