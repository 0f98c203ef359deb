"""Planted bugs in how the ranks agree: see `sim.mutations`."""

from __future__ import annotations

from typing import Any

import msgspec

import pipeline.rank
import pipeline.sequencer
from consensus.entry import Abort, Ballot, Entry, Trailer, Verdict
from consensus.log import Window
from consensus.status import KVPoll
from consensus.store import Leader, Update
from consensus.votes import BallotBox, Bell
from pipeline.effects import Acknowledge, Effect, Relay, Report, Skip
from pipeline.local import Local
from pipeline.outcome import ERROR, Outcome
from pipeline.rank import RankCore
from pipeline.replica import Replica
from pipeline.request import Request
from sim.rank import RankProcess

Patches = list[tuple[object, str, Any]]


def repoll() -> Patches:
    original = RankCore.on_entry

    def again(self: RankCore, verdict: Verdict) -> Verdict:
        mine = self.local.vote(verdict.topic, self.replica)
        bad = {stage for stage, _ in mine.bad}
        kept = tuple(item for item in verdict.good if item[0] not in bad)
        known = {stage for stage, _ in kept}
        added = tuple((stage, b"") for stage in mine.good if stage not in known and verdict.topic != "transfer")
        return Verdict(verdict.topic, verdict.ballot_seq, (*kept, *added), verdict.bad)

    def on_entry(self: RankCore, entry: Entry, trailer: Trailer) -> list[Effect]:
        changed = msgspec.structs.replace(entry, verdicts=tuple(again(self, v) for v in entry.verdicts))
        effects = original(self, changed, trailer)
        return [Relay(entry, e.trailer) if isinstance(e, Relay) else e for e in effects]

    return [(RankCore, "on_entry", on_entry)]


def union() -> Patches:
    def join(before: Ballot, mine: Ballot) -> Ballot:
        return Ballot(before.topic, tuple(dict.fromkeys((*before.good, *mine.good))), (*before.bad, *mine.bad))

    return [(pipeline.rank, "join", join)]


def good_wins() -> Patches:
    def join(before: Ballot, mine: Ballot) -> Ballot:
        voted = [*mine.good, *(key for key, _ in mine.bad)]
        return Ballot(before.topic, tuple(k for k in before.good if k in voted), (*before.bad, *mine.bad))

    def conclude(ballot: Ballot) -> Ballot:
        return Ballot(ballot.topic, ballot.good, tuple(item for item in ballot.bad if item[0] not in ballot.good))

    return [(pipeline.rank, "join", join), (pipeline.sequencer, "conclude", conclude)]


def bad_ignored() -> Patches:
    return [(pipeline.sequencer, "conclude", lambda ballot: Ballot(ballot.topic, ballot.good, ()))]


def no_stage_seq() -> Patches:
    def is_votable(self: Replica, topic: str, key: Any) -> bool:
        request = self.requests.get(key.key)
        return request is not None and self.topics.get(request.state) == topic

    def find(self: Local, request: Any, topic: str) -> Any:
        return self._seen.get(request.key.room, {}).get(topic)

    return [(Replica, "is_votable", is_votable), (Local, "_find", find)]


def lost_bells() -> Patches:
    original = BallotBox.ring

    def ring(self: BallotBox, bell: Bell) -> None:
        topic = self._topics[bell.topic]
        dirty, outstanding = topic.dirty, topic.outstanding
        original(self, bell)
        if outstanding:
            topic.dirty = dirty

    return [(BallotBox, "ring", ring)]


def ballot_with_verdict() -> Patches:
    write = pipeline.sequencer.Sequencer._write

    def due(self: BallotBox, seq: int) -> tuple[str, ...]:
        return tuple(name for name, topic in self._topics.items() if topic.dirty)

    def opened(self: BallotBox, topics: Any, seq: int) -> None:
        for name in topics:
            self._topics[name].outstanding, self._topics[name].dirty = seq, False

    def settled(self: BallotBox, verdict: Verdict, seq: int) -> None:
        topic = self._topics[verdict.topic]
        if topic.outstanding == verdict.ballot_seq:
            topic.outstanding = 0
        for key, _ in (*verdict.good, *verdict.bad):
            topic.bells.pop(key.key, None)

    return [(BallotBox, "due", due), (BallotBox, "opened", opened), (BallotBox, "settled", settled),
            (pipeline.sequencer.Sequencer, "_write", write)]  # fmt: skip


def verdict_unchecked() -> Patches:
    def verdict(self: Replica, verdict: Verdict) -> None:
        for stage, payload in verdict.good:
            if stage.key in self.requests:
                self.on_good(self.requests[stage.key], verdict.topic, payload)
        for stage, reason in verdict.bad:
            if stage.key in self.requests:
                self.on_bad(self.requests[stage.key], verdict.topic, reason)

    return [(Replica, "_verdict", verdict)]


def no_tombstone() -> Patches:
    original = Leader.apply

    def apply(self: Leader, update: Update) -> tuple[KVPoll, str] | None:
        if update.status is None and update.number == self._numbers[update.rank] + 1:
            self._numbers[update.rank] = update.number
            self._rooms.pop(update.room, None)
            return None
        return original(self, update)

    return [(Leader, "apply", apply)]


def short_tombstone() -> Patches:
    """The leader's own deletion takes all of the room along, and nobody else's is looked at."""
    original = Leader.apply

    def apply(self: Leader, update: Update) -> tuple[KVPoll, str] | None:
        if update.status is None and update.number == self._numbers[update.rank] + 1:
            self._numbers[update.rank] = update.number
            if update.rank == 0:
                self._rooms.pop(update.room, None)
            return None
        return original(self, update)

    return [(Leader, "apply", apply)]


def failed_forgiven() -> Patches:
    return [(KVPoll, "then", lambda self, new: new)]


def reports_after_effects() -> Patches:
    original = RankCore.settle

    def settle(self: RankCore, entry: Entry, effects: list[Effect]) -> list[Effect]:
        out = original(self, entry, effects)
        late: list[Effect] = [effect for effect in out if isinstance(effect, Report)]
        return [*(effect for effect in out if not isinstance(effect, Report)), *late]

    return [(RankCore, "settle", settle)]


def silent_when_empty() -> Patches:
    original = RankCore.on_entry

    def on_entry(self: RankCore, entry: Entry, trailer: Trailer) -> list[Effect]:
        effects = original(self, entry, trailer)
        if self.replica.requests:
            return effects
        return [effect for effect in effects if not isinstance(effect, Acknowledge)]

    return [(RankCore, "on_entry", on_entry)]


def no_window() -> Patches:
    return [(Window, "full", property(lambda self: False))]


def own_clock() -> Patches:
    original = RankProcess.on_entry

    def on_entry(self: RankProcess, item: tuple[Entry, Trailer]) -> None:
        if self.alive:
            replica = self.core.replica
            late = [r for r in replica.requests.values() if self.world.clock.now >= r.deadline]
            for request in late:
                replica._abort(Abort(request.key, ERROR, f"timed out while {request.state}"))
        original(self, item)

    return [(RankProcess, "on_entry", on_entry)]


def skip_shared() -> Patches:
    def end_when_harvested(self: Replica, request: Request, outcome: Outcome) -> None:
        request.ending = outcome
        for tick in request.ticks:
            self.emit(Skip(tick))

    return [(Replica, "end_when_harvested", end_when_harvested)]
