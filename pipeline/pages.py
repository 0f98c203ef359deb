"""The page allocator: which page ids are free, and which to hand out.

Deterministic, so that equal calls on all ranks give equal ids. It prefers contiguous runs, because a
contiguous run is one transfer descriptor: the lowest run that fits, else the fewest runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


class PagePool:
    """`size` pages, ids 0..size-1, all free at first."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Free runs as (first id, length): ascending, never adjacent.
        self.runs: list[tuple[int, int]] = [(0, size)] if size else []
        self.free = size

    def take(self, count: int) -> tuple[int, ...]:
        """Removes and returns `count` ids; the caller has checked that they are free."""
        assert 0 < count <= self.free, (count, self.free)
        self.free -= count
        for index, (first, length) in enumerate(self.runs):
            if length >= count:
                self._cut(index, count)
                return tuple(range(first, first + count))
        taken: list[int] = []
        while len(taken) < count:
            # The longest run, the lowest among equals: fewest runs, hence fewest descriptors.
            index = min(range(len(self.runs)), key=lambda i: (-self.runs[i][1], self.runs[i][0]))
            first, length = self.runs[index]
            part = min(length, count - len(taken))
            self._cut(index, part)
            taken.extend(range(first, first + part))
        return tuple(taken)

    def _cut(self, index: int, count: int) -> None:
        first, length = self.runs[index]
        if length == count:
            del self.runs[index]
        else:
            self.runs[index] = (first + count, length - count)

    def give(self, pages: Sequence[int]) -> None:
        """Returns ids to the free list. A page that is free already is a bug and stops the rank."""
        for first, length in _runs_of(sorted(pages)):
            self._insert(first, length)
        self.free += len(pages)
        assert self.free <= self.size

    def _insert(self, first: int, length: int) -> None:
        at = bisect_left(self.runs, (first, 0))
        before = self.runs[at - 1] if at else None
        after = self.runs[at] if at < len(self.runs) else None
        assert before is None or before[0] + before[1] <= first, f"page {first} freed twice"
        assert after is None or first + length <= after[0], f"page {after[0]} freed twice"
        if before is not None and before[0] + before[1] == first:
            self.runs.remove(before)
            first, length = before[0], before[1] + length
        if after is not None and first + length == after[0]:
            self.runs.remove(after)
            length += after[1]
        insort(self.runs, (first, length))

    def ids(self) -> list[int]:
        """All free ids, ascending; for the auditor."""
        return [page for first, length in self.runs for page in range(first, first + length)]


def _runs_of(pages: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for page in pages:
        assert not runs or page >= runs[-1][0] + runs[-1][1], f"page {page} given twice"
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
