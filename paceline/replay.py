"""`paceline replay`: what a rank decided, from its flight recording, and where two ranks first differ.

In: a dump or segment file (the daemon's log names it). Out: one line per decision; exit code 1 if the
replay does not give the recorded digests, if nothing touched the `--request`, or if `--diff` finds a difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from consensus import recorder
from consensus.recorder import Flight
from decode.scheduler import DecodeReplica
from pipeline.replay import Step, compare, difference, replay
from pipeline.replica import Replica, ReplicaConfig
from prefill.scheduler import PrefillReplica

ROLES: dict[str, Callable[[ReplicaConfig], Replica]] = {"prefill": PrefillReplica, "decode": DecodeReplica}


def load(path: str) -> Flight:
    """Raises `SystemExit` with what is wrong with the file."""
    try:
        flight = recorder.read(Path(path).read_bytes())
    except OSError as error:
        raise SystemExit(f"paceline: cannot read {path}: {error.strerror}") from error
    except recorder.FlightError as error:
        detail = str(error).removeprefix("not a flight recording: ")
        raise SystemExit(f"paceline: {path} is not a flight recording ({detail})") from error
    if flight.header.role not in ROLES:
        raise SystemExit(f"paceline: {path}: unknown role {flight.header.role!r}")
    return flight


def run(path: str, until: int | None, diff: str | None, request: str | None) -> int:
    """Prints the replay of `path`; returns the exit code."""
    flight = load(path)
    header = flight.header
    span = f"seq {flight.records[0].entry.seq} to {flight.records[-1].entry.seq}" if flight.records else "no entries"
    print(f"{header.instance} epoch {header.epoch} rank {header.rank} ({header.role}), {span}")
    if header.reason:
        print(f"stopped: {header.reason}")
    if diff is not None:
        return _diff(flight, load(diff))
    return _replay(flight, until, request)


def _replay(flight: Flight, until: int | None, request: str | None) -> int:
    shown = 0
    for step in replay(flight, ROLES[flight.header.role]):
        if until is not None and step.record.entry.seq > until:
            break
        shown += _print(step, request)
        if not step.same:
            found = compare(step.record.entry, step.record.notes, step.notes)
            print(f"DIFFERS from the recording at {found or f'seq {step.record.entry.seq}'}")
            return 1
    if request is not None and not shown:
        span = "in this recording" if until is None else f"up to seq {until}"
        print(f"nothing touched request {request} {span}", file=sys.stderr)
        return 1
    return 0


def _print(step: Step, request: str | None) -> int:
    """Returns how many lines it printed."""
    notes = [note for note in step.notes if request is None or request in note]
    for note in notes:
        print(f"seq {step.record.entry.seq:>7} {' '.join(map(str, note))}")
    return len(notes)


def _diff(left: Flight, right: Flight) -> int:
    if (left.header.instance, left.header.epoch) != (right.header.instance, right.header.epoch):
        raise SystemExit("paceline: the two recordings are not of one instance and epoch")
    found = difference(left, right)
    if found is None:
        print("the two ranks decided alike in everything both recorded")
        return 0
    print(f"FIRST DIFFERENCE, rank {left.header.rank} against rank {right.header.rank}: {found}")
    return 1
