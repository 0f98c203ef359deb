"""The flight recorder: the last entries a rank applied, what it decided at each, and their one wire form.

A *flight* is a header and records in sequence. The header carries the state the records start from, so
that they can be applied again offline. As bytes it is a run of length-prefixed msgpack frames; a torn
last frame (the rank was killed while writing) ends it without an error. Nothing here touches a disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from consensus.digest import Note
from consensus.entry import Entry

_PREFIX = 4  # bytes of a frame's length, big-endian
MAX_FRAME = 256 << 20


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One applied entry, the decisions it caused, and the digest after it."""

    entry: Entry
    notes: tuple[Note, ...]
    digest: bytes


class Header(msgspec.Struct, frozen=True):
    """Whose flight it is and the state before its first record (an encoded `pipeline.snapshot.Snapshot`)."""

    role: str
    instance: str
    epoch: int
    rank: int
    snapshot: bytes
    reason: str = ""  # why it was dumped, if it was


@dataclass(frozen=True, slots=True)
class Flight:
    header: Header
    records: list[Record]


class FlightError(ValueError):
    """Bytes that are not a flight."""


class Recorder:
    """Keeps the last `limit` records in memory; `fresh` hands each record to the shell once."""

    def __init__(self, limit: int = 4096) -> None:
        self._records: deque[Record] = deque(maxlen=limit)
        self._fresh: list[Record] = []

    def record(self, entry: Entry, notes: tuple[Note, ...], digest: bytes) -> None:
        record = Record(entry, notes, digest)
        self._records.append(record)
        self._fresh.append(record)

    @property
    def latest(self) -> Record:
        """Of the entry applied last; there must have been one."""
        return self._records[-1]

    def records(self) -> list[Record]:
        return list(self._records)

    def fresh(self) -> list[Record]:
        """Records since the last call; the caller asks after every entry or burst of entries."""
        fresh, self._fresh = self._fresh, []
        return fresh


def story(records: list[Record], request: str) -> list[str]:
    """Every decision about a request, in order, one line each: what a failing test prints."""
    return [f"seq {record.entry.seq}: {note}" for record in records for note in record.notes if request in note]


def frame(item: Header | Record) -> bytes:
    body = msgspec.msgpack.encode(item)
    return len(body).to_bytes(_PREFIX, "big") + body


def read(data: bytes) -> Flight:
    """Raises `FlightError` for bytes that do not begin as a flight or break off in the wrong way."""
    frames = _frames(data)
    try:
        header = msgspec.msgpack.decode(next(frames, b""), type=Header)
        records = [msgspec.msgpack.decode(body, type=Record) for body in frames]
    except msgspec.DecodeError as error:
        raise FlightError(f"not a flight recording: {error}") from error
    for before, after in zip(records, records[1:], strict=False):
        if after.entry.seq != before.entry.seq + 1:
            raise FlightError(f"a hole between seq {before.entry.seq} and {after.entry.seq}")
    return Flight(header, records)


def join(older: Flight, newer: Flight) -> Flight:
    """Two flights of one rank as one, if the newer goes on where the older ends; else the newer alone."""
    if (older.header.instance, older.header.epoch) != (newer.header.instance, newer.header.epoch):
        return newer
    if not newer.records:  # a segment that has just begun
        return older
    if not older.records or newer.records[0].entry.seq != older.records[-1].entry.seq + 1:
        return newer
    return Flight(older.header, older.records + newer.records)


def _frames(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _PREFIX <= len(data):
        length = int.from_bytes(data[at : at + _PREFIX], "big")
        if length > MAX_FRAME:
            raise FlightError(f"a frame of {length} bytes is over the bound of {MAX_FRAME}")
        at += _PREFIX
        if at + length > len(data):
            return
        yield data[at : at + length]
        at += length
