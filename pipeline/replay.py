"""Runs a recorded log again, offline: the log is the only input, so every decision comes out again.

In: a flight, and the role's replica class. Out: per entry the decisions taken now beside the recorded
ones. Two ranks' flights of one epoch are compared directly: the first entry at which they decided
differently is where they diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

import msgspec

from consensus.digest import Note
from consensus.entry import Entry
from consensus.recorder import Flight, Record
from pipeline import snapshot
from pipeline.replica import Replica, ReplicaConfig
from pipeline.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Step:
    """One entry run again. `same` says whether the recorded digest came out."""

    record: Record
    notes: tuple[Note, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that two recordings of one entry do not share."""

    entry: Entry
    index: int  # of the decision within the entry
    left: Note | None
    right: Note | None

    def __str__(self) -> str:
        launch = f", tick {self.entry.launch.tick}" if self.entry.launch else ""
        return f"seq {self.entry.seq}{launch}, decision {self.index}: {self.left} against {self.right}"


def replay(flight: Flight, make: Callable[[ReplicaConfig], Replica]) -> Iterator[Step]:
    """Applies the flight's entries to its snapshot. Raises what the core raises: that too is a finding."""
    replica = snapshot.restore(msgspec.msgpack.decode(flight.header.snapshot, type=Snapshot), make)
    for record in flight.records:
        replica.apply(record.entry)
        if record.entry.launch is not None:
            replica.launch(record.entry.launch)
        notes = replica.fold()
        yield Step(record, notes, replica.digest.value == record.digest)


def compare(entry: Entry, left: tuple[Note, ...], right: tuple[Note, ...]) -> Difference | None:
    """The first decision of one entry that the two sides do not share."""
    for index, (a, b) in enumerate(zip_longest(left, right)):
        if a != b:
            return Difference(entry, index, a, b)
    return None


def difference(left: Flight, right: Flight) -> Difference | None:
    """Where two ranks of one instance and epoch first decided differently, in what both recorded."""
    others = {record.entry.seq: record for record in right.records}
    for record in left.records:
        other = others.get(record.entry.seq)
        if other is not None and (found := compare(record.entry, record.notes, other.notes)) is not None:
            return found
    return None
