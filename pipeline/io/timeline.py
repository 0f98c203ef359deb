"""What one rank did and when: its last ticks, log entries and hand-overs, for `paceline timeline`.

In: moments that the control loop sees, in µs of this host's monotonic clock. Out: a `RankTimeline`.
Invariants: memory is bounded (the oldest makes room), one tuple is made per tick, entry and hand-over, and only
the control loop touches it: the executor's own moments come with its events.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from pipeline.planner import Batch

KEPT = 4096  # of each kind: with the longest request ids a whole timeline fits into a control frame


class TickTimes(msgspec.Struct, array_like=True):
    """One microbatch on this rank; a moment that has not come yet is 0."""

    tick: int
    slot: int
    rows: int
    tokens: int
    request: str  # of its first row
    start: int  # position of that row's first token in the request
    launched: int  # queued for the executor
    began: int = 0  # the executor took it
    fed: int = 0  # the hidden states of the rank before were there
    ended: int = 0  # forward, and on the last rank sampling, were over
    harvested: int = 0  # its result was applied from the log


class EntryTimes(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    clock: int  # rank 0's, when it was composed
    applied: int
    inputs: int  # requests, aborts, admissions, verdicts and returns in it
    ballots: int
    launch: int  # tick, or 0


class HandOverTimes(msgspec.Struct, frozen=True, array_like=True):
    """KV of one room pushed by (prefill), or awaited by (decode), this rank."""

    room: str
    began: int
    ended: int
    good: bool


class RankTimeline(msgspec.Struct, frozen=True, array_like=True):
    wall_offset: int  # wall clock minus monotonic clock of this host, µs
    now: int
    ticks: list[TickTimes]
    entries: list[EntryTimes]
    hand_overs: list[HandOverTimes]


class Timeline:
    def __init__(self) -> None:
        self._ticks: deque[TickTimes] = deque(maxlen=KEPT)
        self._flight: dict[int, TickTimes] = {}  # a moment of theirs is still to come
        self._entries: deque[EntryTimes] = deque(maxlen=KEPT)
        self._hand_overs: deque[HandOverTimes] = deque(maxlen=KEPT)

    def launched(self, batch: Batch, now: int) -> None:
        first = batch.rows[0]
        times = TickTimes(batch.tick, batch.slot, len(batch.rows), batch.tokens, first.key.request, first.start, now)
        self._ticks.append(times)
        self._flight[batch.tick] = times

    def ran(self, tick: int, began: int, fed: int, ended: int) -> None:
        if (times := self._flight.get(tick)) is not None:
            times.began, times.fed, times.ended = began, fed, ended
            self._forget_if_over(times)

    def harvested(self, tick: int, now: int) -> None:
        if (times := self._flight.get(tick)) is not None:
            times.harvested = now
            self._forget_if_over(times)

    def _forget_if_over(self, times: TickTimes) -> None:
        # A tick's result may come round the ring before the loop has heard of its own executor.
        if times.ended and times.harvested:
            del self._flight[times.tick]

    def applied(self, times: EntryTimes) -> None:
        self._entries.append(times)

    def handed_over(self, times: HandOverTimes) -> None:
        self._hand_overs.append(times)

    def last(self, seconds: float) -> RankTimeline:
        """What ended in the last `seconds`, and what is under way."""
        now = time.monotonic_ns() // 1000
        since = now - int(seconds * 1e6)
        return RankTimeline(
            time.time_ns() // 1000 - now,
            now,
            [times for times in self._ticks if times.harvested == 0 or times.harvested >= since],
            [times for times in self._entries if times.applied >= since],
            [times for times in self._hand_overs if times.ended >= since],
        )
