"""Bubbles and control of a rank, from moments made up and known."""

from __future__ import annotations

import os

import pytest

from bench.members import Member, spent
from bench.rank_figures import figures, rows
from bench.timelines import RankTimes, busy
from paceline_proto.v1 import timeline_pb2


def tick(number: int, *moments: int, rows: int = 1) -> timeline_pb2.TickTimes:
    launched, began, fed, ended, harvested = moments
    return timeline_pb2.TickTimes(
        tick=number, rows=rows, launched_us=launched, began_us=began, fed_us=fed, ended_us=ended, harvested_us=harvested,
    )  # fmt: skip


def times(*ticks: timeline_pb2.TickTimes, lost: bool = False) -> RankTimes:
    entries = [timeline_pb2.EntryTimes(seq=seq) for seq in range(8, 14)]
    return RankTimes("prefill-0", "prefill", 1, ticks, entries, lost)


# In flight from 100 to 900; computing 320–600 and 620–800; the executor waits 105–320 and 600–620.
SECOND_RANK = times(tick(4, 100, 105, 320, 600, 700, rows=3), tick(5, 120, 600, 620, 800, 900))


def test_time_in_flight_is_computing_waiting_or_empty() -> None:
    found = busy(SECOND_RANK, 0, 10_000)
    assert found.in_flight == pytest.approx(800e-6)
    assert found.computing == pytest.approx(460e-6)
    assert found.waiting == pytest.approx(235e-6)
    assert found.empty == pytest.approx(105e-6)
    assert found.bubble_fraction == pytest.approx(340 / 800)


def test_only_what_lies_in_the_load_counts() -> None:
    found = busy(SECOND_RANK, 400, 850)
    assert (found.in_flight, found.computing) == (pytest.approx(450e-6), pytest.approx(380e-6))


def test_a_rank_without_work_has_no_bubbles() -> None:
    apart = times(tick(1, 100, 100, 100, 200, 200), tick(2, 5000, 5000, 5000, 5100, 5100))
    assert busy(apart, 0, 10_000).bubble_fraction == 0
    assert busy(times(), 0, 10_000).bubble_fraction == 0


def test_control_is_told_per_microbatch_of_the_load() -> None:
    one = figures(SECOND_RANK, 0, 1000, last=(3, 7), control=500e-6)
    assert (one.ticks, one.rows_per_tick, one.entries_per_tick) == (2, 2.0, 3.0)
    assert one.control_us_per_tick == pytest.approx(250)
    assert one.seen == 1
    assert "42.5%" in rows([one])[1]


def test_a_rank_that_forgot_the_beginning_says_so() -> None:
    one = figures(times(*SECOND_RANK.ticks, lost=True), 0, 1000, last=(0, 0), control=500e-6)
    assert one.ticks == 5  # as they are numbered, not as they are kept
    assert one.seen == pytest.approx(0.9)
    assert "last 90%" in rows([one])[-1]


def test_the_main_thread_is_told_apart_from_the_process() -> None:
    before = spent([Member("me", os.getpid()), Member("nobody", 1 << 22)])
    total = 0
    while (after := spent([Member("me", os.getpid())]))["me"].main < before["me"].main + 0.05:
        total += sum(range(10_000))
    assert list(before) == ["me"] and total
    assert after["me"].whole >= before["me"].whole
    assert after["me"].resident > 1 << 20
