"""What a rank's control loop tells about itself: phases of attempts, counters, the timeline.

In: records of the log as they are applied, what the executor did, what the transfer saw. Out: `Stages` for
the daemon (rank 0), counters for `StatusReport`, a `RankTimeline`. Invariant: nothing here reaches the core; a
rank without it would decide the same.

*Bubble*: work of the log is in flight on this rank and its executor computes nothing. As every batch computes
between its launch and its harvest, that is the time with a tick in flight less the time computing.
"""

from __future__ import annotations

from consensus.entry import TRANSFER, Key
from consensus.recorder import Record
from pipeline.effects import CloseRoom, Effect, SendDestinations, StartSender, StopRoom
from pipeline.io.executor import Ran, now_us
from pipeline.io.timeline import EntryTimes, HandOverTimes, RankTimeline, Timeline
from pipeline.local import Observation
from pipeline.phases import PhaseBook, Stages
from pipeline.planner import Batch
from pipeline.replica import Replica


class Watch:
    def __init__(self, replica: Replica, tells: bool) -> None:
        """`tells`: this is rank 0, which tells tokens and outcomes."""
        self._replica = replica
        self._book = PhaseBook(replica.first_state) if tells else None
        self._timeline = Timeline()
        self._clock = 0  # of the entry applied last
        self._flight_since = 0
        self._waiting: dict[str, None] = {}  # rooms whose first write is still to come
        self._moving: dict[str, int] = {}  # rooms whose KV is under way, and since when
        self._counted = dict.fromkeys(
            (
                "entries_applied", "ballots_opened", "verdicts", "ticks", "compute_us", "hidden_wait_us",
                "in_flight_us", "transfer_us",
            ), 0,
        )  # fmt: skip

    # -- the log ---------------------------------------------------------------------------------------

    def applied(self, record: Record) -> None:
        """Called for every entry, before its effects are carried out."""
        entry, now, counted = record.entry, now_us(), self._counted
        self._clock = entry.clock
        if self._book is not None:
            self._book.apply(record)
        counted["entries_applied"] += 1
        counted["ballots_opened"] += len(entry.ballots)
        counted["verdicts"] += len(entry.verdicts)
        for returned in entry.returns:
            self._timeline.harvested(returned.tick, now)
        if entry.launch is not None:
            counted["ticks"] += 1
        inputs = len(entry.requests) + len(entry.aborts) + len(entry.admissions)
        inputs += len(entry.verdicts) + len(entry.returns)
        launch = entry.launch.tick if entry.launch is not None else 0
        self._timeline.applied(EntryTimes(entry.seq, entry.clock, now, inputs, len(entry.ballots), launch))
        if self._flight_since and (not self._replica.slots.in_flight or entry.returns):
            counted["in_flight_us"] += now - self._flight_since
            self._flight_since = 0
        if not self._flight_since and self._replica.slots.in_flight:
            self._flight_since = now

    def first_token(self, key: Key) -> Stages:
        return self._book.at_first_token(key, self._clock) if self._book is not None else ()

    def ended(self, key: Key) -> Stages:
        return self._book.at_end(key) if self._book is not None else ()

    # -- the executor ----------------------------------------------------------------------------------

    def launched(self, batch: Batch) -> None:
        self._timeline.launched(batch, now_us())

    def wrote(self, batch: Batch) -> None:
        """Some layer of the batch can be pushed."""
        if self._waiting:
            for row in batch.rows:
                if row.key.room in self._waiting:
                    del self._waiting[row.key.room]
                    self._moving[row.key.room] = now_us()

    def ran(self, event: Ran) -> None:
        self._counted["hidden_wait_us"] += event.fed - event.began
        self._counted["compute_us"] += event.ended - event.fed
        self._timeline.ran(event.batch.tick, event.began, event.fed, event.ended)

    # -- the transfer ----------------------------------------------------------------------------------

    def performed(self, effect: Effect) -> None:
        match effect:
            case StartSender(room):
                self._waiting[room] = None
            case SendDestinations(room):
                self._moving[room] = now_us()
            case StopRoom(room) | CloseRoom(room):
                self._waiting.pop(room, None)
                self._over(room, False)

    def observed(self, seen: Observation) -> None:
        if seen.topic == TRANSFER:
            self._over(seen.room, seen.good)

    def _over(self, room: str, good: bool) -> None:
        if (began := self._moving.pop(room, 0)) != 0:
            now = now_us()
            self._counted["transfer_us"] += now - began
            self._timeline.handed_over(HandOverTimes(room, began, now, good))

    # -- what is told ----------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        under_way = now_us() - self._flight_since if self._flight_since else 0
        return self._counted | {"in_flight_us": self._counted["in_flight_us"] + under_way}

    def timeline(self, seconds: float) -> RankTimeline:
        return self._timeline.last(seconds)
