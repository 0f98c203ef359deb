"""The running digest of a rank's decisions.

In: every decision an entry caused (a state change, pages given or taken, a batch), as plain values.
Out: after each entry, 16 bytes that two ranks share exactly when they took the same decisions, in the
same order, since the start of the epoch. Chaining makes a single difference visible for ever after,
and costs time in proportion to what changed, not to what exists.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

Note = tuple[str | int | tuple[int, ...], ...]
_SIZE = 16


class Digest:
    """Collects the notes of one entry and folds them into the chain."""

    def __init__(self, epoch: int) -> None:
        self.value = blake2b(b"paceline" + epoch.to_bytes(8, "big"), digest_size=_SIZE).digest()
        self._notes: list[Note] = []
        self._encoder = msgspec.msgpack.Encoder()

    def note(self, *decision: str | int | tuple[int, ...]) -> None:
        """Adds one decision of the entry being applied."""
        self._notes.append(decision)

    def fold(self) -> tuple[Note, ...]:
        """Ends the entry: chains its notes into `value` and returns them for the recorder."""
        notes = tuple(self._notes)
        self._notes.clear()
        self.value = blake2b(self.value + self._encoder.encode(notes), digest_size=_SIZE).digest()
        return notes
