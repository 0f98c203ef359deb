"""The flight recorder: the last entries a rank applied and what it decided at each.

Bounded memory; nothing here touches a disk. `dump` is the one wire form, written by the shell when the
rank fail-stops, and read back by `load`.
"""

from __future__ import annotations

from collections import deque

import msgspec

from consensus.digest import Note
from consensus.entry import Entry


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One applied entry, the decisions it caused, and the digest after it."""

    entry: Entry
    notes: tuple[Note, ...]
    digest: bytes


class Dump(msgspec.Struct, frozen=True):
    """What a rank leaves behind: who it was, why it stopped, and its last records in order."""

    instance: str
    epoch: int
    rank: int
    reason: str
    records: list[Record]


class Recorder:
    """Keeps the last `limit` records."""

    def __init__(self, limit: int = 4096) -> None:
        self._records: deque[Record] = deque(maxlen=limit)

    def record(self, entry: Entry, notes: tuple[Note, ...], digest: bytes) -> None:
        self._records.append(Record(entry, notes, digest))

    def story(self, request: str) -> list[str]:
        """Every decision about a request, in order, one line each: what a failing test prints."""
        return [f"seq {r.entry.seq}: {note}" for r in self._records for note in r.notes if request in note]

    def dump(self, instance: str, epoch: int, rank: int, reason: str) -> bytes:
        return msgspec.msgpack.encode(Dump(instance, epoch, rank, reason, list(self._records)))


def load(data: bytes) -> Dump:
    """Reads a dump. Raises `msgspec.DecodeError` (or `ValidationError`) on anything else."""
    return msgspec.msgpack.decode(data, type=Dump)
