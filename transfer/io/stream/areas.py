"""Areas of memory: what is registered, what is granted, what a mapping holds.

In: (address, bytes) pairs. Out: whether given ranges lie inside them.
Invariant: a range is inside only if one area holds all of it; no arithmetic on a peer's numbers wraps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from ..engine import Area

Numbers = NDArray[numpy.uint64]


class Areas:
    """Sorted, not overlapping. `merged`: areas that touch are one."""

    def __init__(self, areas: Sequence[Area] | Numbers, merged: bool = True) -> None:
        """Raises `ValueError` for an area without bytes or outside the address space."""
        try:
            pairs = numpy.array(areas, dtype=numpy.uint64).reshape(-1, 2)
        except OverflowError:
            raise ValueError("an area lies outside the address space") from None
        pairs = pairs[pairs[:, 0].argsort(kind="stable")]
        starts, ends = pairs[:, 0], pairs[:, 0] + pairs[:, 1]
        if not ((starts > 0) & (ends > starts)).all():
            raise ValueError("an area is empty, or lies outside the address space")
        if merged and len(pairs) > 1:
            reach = numpy.maximum.accumulate(ends)
            first = numpy.concatenate(([True], starts[1:] > reach[:-1]))
            last = numpy.concatenate((first[1:], [True]))
            starts, ends = starts[first], reach[last]
        self.starts: Numbers = numpy.ascontiguousarray(starts)
        self.ends: Numbers = numpy.ascontiguousarray(ends)

    def locate(self, addresses: Numbers, lengths: Numbers) -> NDArray[numpy.intp] | None:
        """The index of the area that holds each range, or None if any is not inside one."""
        if not len(self.starts):
            return None
        index = self.starts.searchsorted(addresses, side="right") - 1
        ends = self.ends[index]  # -1 is before the first area: the last one's end, ruled out by its start
        inside = (addresses >= self.starts[index]) & (addresses < ends) & (lengths <= ends - addresses)
        return index if inside.all() else None

    def cover(self, addresses: Numbers, lengths: Numbers) -> bool:
        return self.locate(addresses, lengths) is not None

    def pairs(self) -> Numbers:
        """Rows of (address, bytes)."""
        return numpy.stack((self.starts, self.ends - self.starts), axis=1)


@dataclass(eq=False, slots=True)
class Lease:
    """Compared by identity: the same name may be granted again, and is then another lease."""

    name: bytes
    areas: Areas
    slot: int | None = None  # in the table of leases that peers on this host lock; once one asked
    nonce: bytes = b""
