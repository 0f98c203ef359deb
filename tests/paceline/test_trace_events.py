"""The trace for Perfetto and the figures of bubbles, from times made up and known."""

from __future__ import annotations

import json

import pytest

from paceline.timeline import table
from paceline.trace_events import BUBBLES, EXECUTOR, bubbles, summarize, trace
from paceline_proto.v1 import common_pb2, timeline_pb2
from tests.paceline.chrome_trace import check_trace


def tick(number: int, *moments: int, tokens: int = 1) -> timeline_pb2.TickTimes:
    launched, began, fed, ended, harvested = moments
    return timeline_pb2.TickTimes(
        tick=number, rows=1, tokens=tokens, request_id="r", launched_us=launched, began_us=began, fed_us=fed,
        ended_us=ended, harvested_us=harvested,
    )  # fmt: skip


def told(rank: int, *ticks: timeline_pb2.TickTimes, offset: int = 0) -> timeline_pb2.TimelineReadResponse:
    return timeline_pb2.TimelineReadResponse(
        instance=common_pb2.InstanceRef(instance_id="prefill-0"), role=common_pb2.ROLE_PREFILL, rank=rank,
        wall_offset_us=offset, now_us=10_000, ticks=ticks,
        entries=[timeline_pb2.EntryTimes(seq=3, clock_us=90, applied_us=100, launch=1)],
        hand_overs=[timeline_pb2.HandOverTimes(room="r/0", began_us=150, ended_us=900, good=True)],
    )  # fmt: skip


FIRST = told(0, tick(1, 100, 110, 110, 300, 700, tokens=8), tick(2, 120, 300, 300, 500, 900))
SECOND = told(1, tick(1, 100, 105, 320, 600, 700, tokens=8), tick(2, 120, 600, 620, 800, 900), offset=1_000)


def test_bubbles_are_work_in_flight_less_computing() -> None:
    assert bubbles(FIRST) == [(100, 110), (500, 900)]
    assert bubbles(SECOND) == [(100, 320), (600, 620), (800, 900)]
    first, second = summarize([SECOND, FIRST])
    assert (first.rank, first.ticks, first.tokens) == (0, 2, 9)
    assert first.in_flight == pytest.approx(800e-6) == second.in_flight
    assert first.computing == pytest.approx(390e-6) and second.computing == pytest.approx(460e-6)
    assert second.waiting_for_hidden == pytest.approx(235e-6)
    assert first.bubble_fraction == pytest.approx(1 - 390 / 800)
    assert "51.2%" in table([first, second]) and "42.5%" in table([first, second])


def test_idle_time_between_requests_is_no_bubble() -> None:
    apart = told(0, tick(1, 100, 100, 100, 200, 200), tick(2, 5000, 5000, 5000, 5100, 5100))
    assert bubbles(apart) == []
    assert summarize([apart])[0].bubble_fraction == 0


def test_what_is_under_way_or_nothing_at_all_is_no_trouble() -> None:
    (empty,) = summarize([timeline_pb2.TimelineReadResponse()])
    assert empty.ticks == 0 and empty.bubble_fraction == 0
    check_trace(trace([timeline_pb2.TimelineReadResponse()]))
    running = told(0, tick(1, 100, 110, 110, 0, 0))
    check_trace(trace([running]))
    assert not [
        event for event in trace([running])["traceEvents"] if event.get("tid") == EXECUTOR and event["ph"] == "X"
    ]


def test_ranks_are_on_one_axis_by_their_wall_clocks() -> None:
    made = json.loads(json.dumps(trace([SECOND, FIRST])))
    check_trace(made)
    runs = [event for event in made["traceEvents"] if event["ph"] == "X" and event["name"].startswith("tick")]
    assert [(event["pid"], event["ts"], event["dur"]) for event in runs] == [
        (1, 10, 190), (1, 200, 200), (2, 1220, 280), (2, 1520, 180),
    ]  # fmt: skip
    shown = {event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"}
    assert shown == {"prefill-0 rank 0", "prefill-0 rank 1"}
    assert (
        sum(event["dur"] for event in made["traceEvents"] if event.get("tid") == BUBBLES and event["ph"] == "X") == 750
    )
