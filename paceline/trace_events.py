"""Turns what ranks did into a trace for Perfetto (Chrome's JSON format), and into figures.

In: `RankTimeline` messages of any number of ranks. Out: trace events, all ranks on one time axis, and a summary per
rank. Pure. Each rank is a process of the trace with three rows: executor (waits for hidden states, computes),
bubbles and control (log entries, launches), and hand-overs as asynchronous spans, for they overlap. Times of
different hosts are as comparable as their wall clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_proto.v1 import common_pb2, timeline_pb2
from telemetry.intervals import Span, length, uncovered, union

EXECUTOR, BUBBLES, CONTROL, HAND_OVERS = 1, 2, 3, 4
_ROWS = {EXECUTOR: "executor", BUBBLES: "bubbles", CONTROL: "control", HAND_OVERS: "hand-overs"}
_ROLES = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_DECODE: "decode"}

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Seconds of the ticks that are over; `in_flight` is the time with at least one of them launched."""

    instance: str
    role: str
    rank: int
    ticks: int
    tokens: int
    in_flight: float
    computing: float
    waiting_for_hidden: float

    @property
    def bubble_fraction(self) -> float:
        return 1 - self.computing / self.in_flight if self.in_flight else 0.0


def trace(timelines: Sequence[timeline_pb2.TimelineReadResponse]) -> dict[str, Any]:
    ordered = sorted(timelines, key=_place)
    origin = min((_first(told) for told in ordered), default=0)
    events = [event for pid, told in enumerate(ordered, start=1) for event in _rank_events(told, pid, origin)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"wall_clock_of_ts_0_us": origin}}


def summarize(timelines: Iterable[timeline_pb2.TimelineReadResponse]) -> list[RankSummary]:
    return [_summary(told) for told in sorted(timelines, key=_place)]


def bubbles(told: timeline_pb2.TimelineReadResponse) -> list[Span]:
    """When ticks were in flight on this rank and its executor computed none of them."""
    over = _over(told)
    in_flight = union((t.launched_us, t.harvested_us) for t in over)
    return uncovered(in_flight, union((t.fed_us, t.ended_us) for t in over))


def _summary(told: timeline_pb2.TimelineReadResponse) -> RankSummary:
    over = _over(told)
    return RankSummary(
        told.instance.instance_id,
        _ROLES.get(told.role, "?"),
        told.rank,
        len(over),
        sum(t.tokens for t in over),
        length(union((t.launched_us, t.harvested_us) for t in over)) / 1e6,
        length(union((t.fed_us, t.ended_us) for t in over)) / 1e6,
        length((t.began_us, t.fed_us) for t in over) / 1e6,
    )


def _rank_events(told: timeline_pb2.TimelineReadResponse, pid: int, origin: int) -> Iterable[Event]:
    def at(moment: int) -> int:
        return moment + told.wall_offset_us - origin

    def complete(tid: int, name: str, begin: int, end: int, args: dict[str, Any]) -> Event:
        return {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": name,
            "ts": at(begin),
            "dur": max(0, end - begin),
            "args": args,
        }

    name = f"{told.instance.instance_id} rank {told.rank}"
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, row in _ROWS.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": row}}
    for t in told.ticks:
        if not t.ended_us:
            continue
        about = {
            "tick": t.tick,
            "slot": t.slot,
            "rows": t.rows,
            "tokens": t.tokens,
            "request": t.request_id,
            "start": t.start,
        }
        if t.fed_us > t.began_us:
            yield complete(EXECUTOR, "wait for hidden states", t.began_us, t.fed_us, {"tick": t.tick})
        yield complete(EXECUTOR, f"tick {t.tick}", t.fed_us, t.ended_us, about)
    for begin, end in bubbles(told):
        yield complete(BUBBLES, "bubble", begin, end, {})
    for e in told.entries:
        about = {"seq": e.seq, "inputs": e.inputs, "ballots": e.ballots, "launch": e.launch}
        yield {
            "ph": "i",
            "s": "t",
            "pid": pid,
            "tid": CONTROL,
            "name": f"entry {e.seq}",
            "ts": at(e.applied_us),
            "args": about,
        }
    for number, h in enumerate(told.hand_overs):
        head = {"pid": pid, "tid": HAND_OVERS, "cat": "hand-over", "id": f"{pid}.{number}", "name": h.room}
        yield head | {"ph": "b", "ts": at(h.began_us), "args": {"good": h.good}}
        yield head | {"ph": "e", "ts": at(h.ended_us)}


def _place(told: timeline_pb2.TimelineReadResponse) -> tuple[int, str, int]:
    return told.role, told.instance.instance_id, told.rank


def _first(told: timeline_pb2.TimelineReadResponse) -> int:
    moments = [t.launched_us for t in told.ticks] + [e.applied_us for e in told.entries]
    return min([*moments, *(h.began_us for h in told.hand_overs), told.now_us]) + told.wall_offset_us


def _over(told: timeline_pb2.TimelineReadResponse) -> list[timeline_pb2.TickTimes]:
    return [t for t in told.ticks if t.ended_us and t.harvested_us]
