"""Rank 0's pen: composes the log from everything that can change scheduling state.

In: requests, aborts, returned ticks, acknowledgements with merged votes, store updates and bells of all
ranks, and the clock. Out: at most one entry at a time, already applied to rank 0's own core, with the
effects that follow. It composes when something waits, when a slot can be launched, or when a heartbeat
is due; otherwise it asks for nothing until `wake_at`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from consensus.entry import (
    FILL,
    PREALLOC,
    RELEASE,
    SPILL,
    TRANSFER,
    Abort,
    Admission,
    Ballot,
    Entry,
    Key,
    RequestSpec,
    Return,
    Trailer,
    Verdict,
)
from consensus.log import Window
from consensus.progress import Progress
from consensus.status import KVPoll
from consensus.store import Leader, Update
from consensus.votes import BallotBox, Bell, conclude
from pipeline.effects import Effect, Relay, Report
from pipeline.local import Observation
from pipeline.outcome import ABORT, ERROR
from pipeline.rank import RankCore
from pipeline.request import ABORTING, DONE

HEARTBEAT = 1_000_000  # µs between entries of an idle instance
MAX_ITEMS = 64  # of one kind in one entry, so that an entry stays small on the ring

_T = TypeVar("_T")


class Sequencer:
    """Writes the log of an instance of `pp_size` ranks through rank 0's `core`. Clocks are in µs."""

    def __init__(self, core: RankCore, pp_size: int, clock: int) -> None:
        self.core = core
        self.alone = pp_size == 1
        self.window = Window(2 * pp_size + core.replica.slots.count + 2)
        self.store = Leader(pp_size)
        self.box = BallotBox(pp_size, (PREALLOC, TRANSFER, RELEASE, SPILL, FILL))
        self.dropped = 0  # reports about rooms and stages that are over
        self._requests: deque[RequestSpec] = deque()
        self._aborts: deque[Abort] = deque()
        self._admissions: deque[Admission] = deque()
        self._verdicts: deque[Verdict] = deque()
        self._returns: deque[Return] = deque()
        self._progress: dict[int, Progress] = {}
        self._last_written = clock - HEARTBEAT
        self._next_deadline = 0  # clock of the earliest deadline known; 0 = none

    # -- what may enter the log --------------------------------------------------------------------

    def submit(self, spec: RequestSpec) -> None:
        self._requests.append(spec)

    def cancel(self, key: Key, reason: str) -> None:
        self._aborts.append(Abort(key, ABORT, reason))

    def returned(self, item: Return) -> None:
        self._returns.append(item)

    def observe(self, observation: Observation) -> None:
        """What rank 0 itself saw; heard at once, so that its reports stay in order."""
        self._hear_own_reports(self.core.observe(observation))

    def report(self, item: Update | Bell) -> None:
        """A store update or a bell of any rank. Raises `UpdateLost` on a hole in a rank's updates."""
        if isinstance(item, Update):
            self._store_update(item)
        elif self.core.replica.is_votable(item.topic, item.key):
            self.box.ring(item)
        else:
            self.dropped += 1  # rank 0 is never behind: that stage is over

    def acknowledged(self, seq: int, ballots: Sequence[Ballot]) -> None:
        """The last rank applied entry `seq`; `ballots` are the merged votes it carried."""
        self.window.acked(seq)
        for ballot in map(conclude, ballots):
            # Payloads are rank 0's own observations: it voted good, so it has them.
            rooms = ((stage, stage.key.room) for stage in ballot.good)
            good = tuple((stage, self._payload(ballot.topic, room)) for stage, room in rooms)
            self._verdicts.append(Verdict(ballot.topic, seq, good, ballot.bad))

    # -- writing -----------------------------------------------------------------------------------

    def next_entry(self, clock: int, wall: int) -> list[Effect] | None:
        """Composes, applies and returns the effects of the next entry; None if there is nothing to say."""
        if self.window.full:
            return None
        self._expire(clock)
        replica, seq = self.core.replica, self.core.cursor.applied + 1
        ballots = self.box.due(seq)
        waiting = self._requests or self._aborts or self._admissions or self._verdicts or self._returns or ballots
        if not waiting and clock < self._last_written + HEARTBEAT and replica.choose_launch() is None:
            return None
        entry = Entry(
            replica.config.epoch,
            seq,
            clock,
            wall,
            requests=_take(self._requests),
            aborts=_take(self._aborts),
            admissions=_take(self._admissions),
            verdicts=_take(self._verdicts),
            returns=_take(self._returns),
            ballots=ballots,
        )
        return self._write(entry)

    def stuck(self, clock: int, limit: int) -> str:
        """Why the ring must stop: an entry that nobody acknowledged for `limit` µs. Empty while all is well."""
        oldest = self.window.oldest()
        if oldest is None or clock - oldest[1] <= limit:
            return ""
        return f"entry {oldest[0]} was not acknowledged for {(clock - oldest[1]) / 1e6:.1f} s"

    def note_progress(self, progress: Progress) -> None:
        """A rank's latest word on what its executor does; kept for people, never for decisions."""
        self._progress[progress.rank] = progress

    def stalled(self, clock: int) -> tuple[float, str]:
        """(seconds, what is waited for) while a launched tick has not come back; (0, "") while none is out.

        The culprit is the first rank, in pipeline order, that is busy with that tick or has not reached it.
        """
        slots = self.core.replica.slots
        if not slots.flight:
            return 0.0, ""
        batch = slots.flight[0]
        seconds = (clock - slots.since) / 1e6
        busy = [p for _, p in sorted(self._progress.items()) if p.tick == batch.tick]
        where = f"rank {busy[0].rank} has been in it for {busy[0].seconds:.1f} s" if busy else "no rank says it runs it"
        return seconds, f"tick {batch.tick} ({len(batch.rows)} rows) has not returned for {seconds:.1f} s; {where}"

    def wake_at(self) -> int:
        """Clock at which `next_entry` has something to say even if nothing arrives."""
        heartbeat = self._last_written + HEARTBEAT
        return min(heartbeat, self._next_deadline) if self._next_deadline else heartbeat

    def queues(self) -> dict[str, int]:
        return {
            "log_requests": len(self._requests),
            "log_aborts": len(self._aborts),
            "log_admissions": len(self._admissions),
            "log_verdicts": len(self._verdicts),
            "log_returns": len(self._returns),
            "log_unacknowledged": self.window.unacked,
            "bells": self.box.bells,
            "store_rooms": len(self.store),
        }

    # -- inside ------------------------------------------------------------------------------------

    def _write(self, entry: Entry) -> list[Effect]:
        core, replica = self.core, self.core.replica
        before = replica.digest.value
        votes = core.vote(entry.ballots)
        self.box.opened(entry.ballots, entry.seq)
        for verdict in entry.verdicts:
            self.box.settled(verdict, entry.seq)
        effects = replica.apply(entry)
        launch = replica.choose_launch()
        if launch is not None:
            entry = msgspec.structs.replace(entry, launch=launch)
            effects += replica.launch(launch)
        self._follow_moves()
        effects = core.settle(entry, effects)
        self.window.wrote(entry.seq, entry.clock)
        self._last_written = entry.clock
        effects = self._hear_own_reports(effects)
        if self.alone:
            self.acknowledged(entry.seq, votes)
            return effects
        return [Relay(entry, Trailer(before, votes)), *effects]

    def _hear_own_reports(self, effects: list[Effect]) -> list[Effect]:
        """Rank 0 reports to itself without a wire."""
        others: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Report):
                self.report(effect.item)
            else:
                others.append(effect)
        return others

    def _store_update(self, update: Update) -> None:
        changed = self.store.apply(update)
        key = self.core.replica.rooms.get(update.room)
        if changed is None or key is None:
            return
        conclusion, reason = changed
        if conclusion is KVPoll.FAILED:
            self._admissions.append(Admission(key, False, reason))
        elif conclusion is KVPoll.WAITING_FOR_INPUT:
            self._admissions.append(Admission(key, True))

    def _payload(self, topic: str, room: str) -> bytes:
        # An attempt that ended since its ballot takes its observations along; its verdict is ignored anyway.
        return self.core.local.payload(topic, room) if room in self.core.replica.attempts else b""

    def _follow_moves(self) -> None:
        """Bells of stages that were left are void; new stages bring new deadlines."""
        for request in self.core.replica.moved:
            self.box.forget(request.key, self.core.replica.topics.get(request.state))
            if request.state == DONE:
                continue
            for deadline in (request.deadline, request.stage_deadline):
                if deadline and (not self._next_deadline or deadline < self._next_deadline):
                    self._next_deadline = deadline

    def _expire(self, clock: int) -> None:
        """The leader's topic: deadlines enter the log as aborts. Runs only when the earliest one has passed."""
        if not self._next_deadline or clock < self._next_deadline:
            return
        self._next_deadline = 0
        replica = self.core.replica
        for request in replica.requests.values():
            if request.state == ABORTING or request.ending is not None:
                continue  # it is ending already, by proof or by its last harvest, not by time
            if clock >= request.deadline:
                self._aborts.append(Abort(request.key, ERROR, f"timed out while {request.state}"))
            elif request.stage_deadline and clock >= request.stage_deadline:
                seconds = replica.config.stage_timeout / 1e6
                why = f"{request.state} for more than {seconds:g} s"
                self._aborts.append(Abort(request.key, ERROR, why, retryable=True, hand_over=True))
            else:
                nearest = min(d for d in (request.deadline, request.stage_deadline) if d)
                if not self._next_deadline or nearest < self._next_deadline:
                    self._next_deadline = nearest


def _take(queue: deque[_T]) -> tuple[_T, ...]:
    return tuple(queue.popleft() for _ in range(min(len(queue), MAX_ITEMS)))
