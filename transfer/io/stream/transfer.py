"""A handle of a `stream` engine on its way, and the ways it may take.

In: writes. Out: pieces of them, a bounded number of bytes at a time, in order, each byte once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy
from numpy.typing import NDArray

from ...regions import Write
from .wire import FRAME_PIECES

SOURCE, TARGET, LENGTH = range(3)  # columns of pieces
Pieces = NDArray[numpy.uint64]


class Transfer:
    __slots__ = ("_ends", "count", "handle", "lease", "pieces", "position", "refused", "total")

    def __init__(self, handle: int, lease: bytes, writes: Sequence[Write]) -> None:
        """Raises `ValueError` or `OverflowError` for writes that are none."""
        self.handle, self.lease, self.count = handle, lease, len(writes)
        pieces = numpy.array(writes, dtype=numpy.uint64).reshape(-1, 3)
        self.pieces: Pieces = pieces[pieces[:, LENGTH] > 0]
        if len(self.pieces) and int(self.pieces[:, LENGTH].max()) >> 48:
            raise ValueError("a write longer than any memory")  # so that the sum below cannot wrap
        self._ends = self.pieces[:, LENGTH].cumsum(dtype=numpy.uint64)
        self.total = int(self._ends[-1]) if len(self.pieces) else 0
        self.position = 0  # bytes cut so far
        self.refused: str | None = None

    def cut(self, most: int) -> Pieces:
        """The next `most` bytes, or fewer if they are in too many pieces. There must be something left."""
        ends = self._ends
        end = min(self.position + most, self.total)
        first = int(ends.searchsorted(numpy.uint64(self.position), side="right"))
        last = int(ends.searchsorted(numpy.uint64(end), side="left"))
        if last - first >= FRAME_PIECES:
            last = first + FRAME_PIECES - 1
            end = int(ends[last])
        pieces = self.pieces[first : last + 1].copy()
        skipped = self.position - (int(ends[first]) - int(pieces[0, LENGTH]))
        beyond = int(ends[last]) - end
        pieces[0] += numpy.array((skipped, skipped, 0), dtype=numpy.uint64)
        pieces[0, LENGTH] -= numpy.uint64(skipped)
        pieces[-1, LENGTH] -= numpy.uint64(beyond)
        self.position = end
        return pieces

    @property
    def sources(self) -> NDArray[numpy.uint64]:
        return self.pieces[:, SOURCE]

    @property
    def lengths(self) -> NDArray[numpy.uint64]:
        return self.pieces[:, LENGTH]

    @property
    def whole(self) -> bool:
        """Cut to the end."""
        return self.position == self.total

    def restart(self) -> None:
        """For another path; nothing was sent on the first."""
        self.position, self.refused = 0, None


class Path(Protocol):
    """One way to a peer's memory. It tells its owner what ended and, once, that it broke; it never does both
    for the same transfer, and nothing after `close`."""

    ready: bool  # the other end has welcomed it

    def open(self) -> None:
        """Raises `OSError` if there is no such way."""

    def send(self, transfer: Transfer) -> None: ...
    def close(self) -> None: ...


Ended = Callable[[Transfer, str | None], None]
Broken = Callable[[str, bool], None]  # a reason, and whether there is no use in trying again
