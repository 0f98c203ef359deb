"""Half-open intervals of time: how much of one set another covers. Pure.

In: (begin, end) pairs in any order, which may overlap. Out: disjoint ones in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def length(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def uncovered(whole: Sequence[Span], covering: Sequence[Span]) -> list[Span]:
    """What of `whole` lies in none of `covering`; both disjoint and in order."""
    found: list[Span] = []
    for begin, end in whole:
        at = begin
        for start, stop in covering:
            if stop <= at or start >= end:
                continue
            if start > at:
                found.append((at, start))
            at = max(at, stop)
        if at < end:
            found.append((at, end))
    return found


def within(spans: Iterable[Span], begin: int, end: int) -> list[Span]:
    """The part of each that lies between the two moments."""
    cut = ((max(start, begin), min(stop, end)) for start, stop in spans)
    return [(start, stop) for start, stop in cut if start < stop]
