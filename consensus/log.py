"""Sequence rules of the log: what a follower accepts, and how far rank 0 may run ahead.

Invariants: entries are applied in consecutive sequence within one epoch; rank 0 writes at most `limit`
entries beyond the last one acknowledged, so every buffer on the ring is bounded.
"""

from __future__ import annotations

from collections import deque

from consensus.entry import Entry, Trailer


class Diverged(Exception):
    """The ranks no longer agree, or the log is broken; the only answer is to stop and say so."""


class Cursor:
    """A follower's place in the log."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.applied = 0  # seq of the last applied entry; the first entry is 1

    def check(self, entry: Entry, trailer: Trailer, digest: bytes) -> None:
        """Raises `Diverged` unless `entry` is the next one and the sender's state equals ours.

        `digest` is our own state digest before the entry.
        """
        if entry.seq != self.applied + 1:
            raise Diverged(f"log gap: expected seq {self.applied + 1}, got {entry.seq}")
        if trailer.digest != digest:
            raise Diverged(
                f"state differs after seq {self.applied}: "
                f"predecessor has {trailer.digest.hex()}, this rank {digest.hex()}"
            )

    def advance(self, seq: int) -> None:
        self.applied = seq


class Window:
    """Rank 0's count of entries written and not yet acknowledged by the last rank."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._unacked: deque[tuple[int, int]] = deque()  # (seq, clock when written)

    @property
    def full(self) -> bool:
        return len(self._unacked) >= self.limit

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    def wrote(self, seq: int, clock: int) -> None:
        self._unacked.append((seq, clock))

    def acked(self, seq: int) -> None:
        """`seq` and everything before it was applied by every rank."""
        while self._unacked and self._unacked[0][0] <= seq:
            self._unacked.popleft()

    def oldest(self) -> tuple[int, int] | None:
        """(seq, clock) of the oldest entry that nobody acknowledged, or None."""
        return self._unacked[0] if self._unacked else None
