"""Bugs to plant into the core, each as a patch that is undone: a check that finds nothing must be able to.

In: a name. Out: a context in which the core has that bug. `bounds` are the smallest under which it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from consensus import votes
from consensus.entry import Ballot, Entry, Trailer, Verdict
from consensus.votes import BallotBox, Bell
from decode.scheduler import DecodeReplica
from pipeline import rank, sequencer
from pipeline.effects import Effect
from pipeline.lease import REQUEST, WRITER
from pipeline.local import Local
from pipeline.outcome import Outcome
from pipeline.rank import RankCore
from pipeline.request import Request
from sim.exhaustive_world import Bounds

ONE = ((3, 3),)
Patch = tuple[Any, str, Any]  # owner, attribute, what to put there


@dataclass(frozen=True, slots=True)
class Bug:
    what: str
    shows: str  # part of what the search says of it
    bounds: Bounds
    patches: Callable[[], list[Patch]]


def _re_poll() -> list[Patch]:
    honest = RankCore.on_entry

    def on_entry(self: RankCore, entry: Entry, trailer: Trailer) -> list[Effect]:
        def now(verdict: Verdict) -> Verdict:
            """What this rank sees by now, instead of what was voted."""
            mine = self.local.vote(verdict.topic, self.replica)
            bad = tuple(item for item in verdict.bad if item[0] not in mine.good)
            changed = tuple((stage, b"") for stage, _ in verdict.bad if stage in mine.good)
            return msgspec.structs.replace(verdict, good=verdict.good + changed, bad=bad)

        return honest(self, msgspec.structs.replace(entry, verdicts=tuple(map(now, entry.verdicts))), trailer)

    return [(RankCore, "on_entry", on_entry)]


def _drop_writer() -> list[Patch]:
    def quarantine(self: DecodeReplica, request: Request, outcome: Outcome) -> None:
        self.leases.drop(request.key, WRITER)
        self.leases.drop(request.key, REQUEST)
        self.start_aborting(request, outcome)

    return [(DecodeReplica, "_quarantine", quarantine)]


def _good_wins() -> list[Patch]:
    def join(before: Ballot, mine: Ballot) -> Ballot:
        """A rank that says nothing or bad does not take a good away."""
        good = before.good + tuple(key for key in mine.good if key not in before.good)
        return Ballot(before.topic, good, votes.join(before, mine).bad)

    def conclude(ballot: Ballot) -> Ballot:
        bad = tuple(item for item in ballot.bad if item[0] not in ballot.good)
        return Ballot(ballot.topic, ballot.good, bad)

    return [(rank, "join", join), (sequencer, "conclude", conclude)]


def _bell_lost_while_out() -> list[Patch]:
    honest = BallotBox.ring

    def ring(self: BallotBox, bell: Bell) -> None:
        if not self._topics[bell.topic].outstanding:
            honest(self, bell)

    return [(BallotBox, "ring", ring)]


def _early_bell_lost() -> list[Patch]:
    return [(Local, "bells", lambda self, moved, replica: [])]


def _hasty_deadline() -> list[Patch]:
    """Ends at once what a transfer may still write to, because time is up."""

    def on_abort(self: DecodeReplica, request: Request, outcome: Outcome) -> None:
        if request.state == "transferring" and outcome.reason.startswith("timed out"):
            self.leases.drop(request.key, WRITER)
            self._complete(request, outcome)
        else:
            honest(self, request, outcome)

    honest = DecodeReplica.on_abort
    return [(DecodeReplica, "on_abort", on_abort)]


_PREFILL = Bounds("prefill", True, 2, ONE, late=())
_DECODE = Bounds("decode", False, 2, ONE, late=())
BUGS = {
    "re-poll": Bug(
        "a rank applies what it sees now, not what was voted",
        "decided differently",
        _PREFILL,
        _re_poll,
    ),
    "drop-writer": Bug(
        "an abort forgets that a remote engine still writes",
        "while the transfer may still touch them",
        _DECODE,
        _drop_writer,
    ),
    "good-wins": Bug(
        "one good vote outweighs a missing or a bad one",
        "may still",
        _PREFILL,
        _good_wins,
    ),
    "bell-lost": Bug(
        "a bell that comes while a ballot of its topic is out is dropped",
        "did not end",
        Bounds("decode", False, 2, ((3, 2), (3, 2)), late=("back",), aborts=0, bad=()),
        _bell_lost_while_out,
    ),
    "early-bell-lost": Bug(
        "work that ended before its stage began is never rung for",
        "is not empty at the end",
        _DECODE,
        _early_bell_lost,
    ),
    "hasty-deadline": Bug(
        "a deadline frees pages that a transfer may still write to",
        "may still be touched",
        Bounds("decode", False, 2, ONE, late=(), clock=(20,), timeout=10),
        _hasty_deadline,
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    patches = BUGS[name].patches()
    before = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in patches]
    for owner, attribute, value in patches:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)
