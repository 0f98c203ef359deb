"""Figures against the load: what becomes of the profiles of several loads."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from bench.against_load import large, plot, point, table
from bench.breakdown import Observed, Profile
from bench.rank_figures import ProcessFigures, RankFigures
from bench.records import Record
from bench.run import Run
from bench.summary import summarise, whole_run
from paceline.cli import build_parser


def profile(bubbles: float, phase: str) -> Profile:
    record = Record(
        index=0, scheduled=0, sent=0, ended=3, chunks=((1.0, 1), (1.5, 1), (2.0, 2)), asked_tokens=4, output_tokens=4
    )
    rank = RankFigures("decode-0 rank 0", 9, 2.5, 3.0, 1.0, 1 - bubbles, bubbles, 0.0, bubbles, 310.0, 1.0)
    return Profile(
        Run("m", False, 0, [record]),
        summarise([record], whole_run([record]), {}),
        [
            Observed("paceline_gateway_phase_seconds", f'{{"phase": "{phase}"}}', 1, 0.25),
            Observed("paceline_gateway_time_to_first_token_seconds", "", 2, 0.125),
            Observed("other", "", 1, 9),
        ],
        [rank],
        [ProcessFigures("gateway", 0.004, 0.003, 0.001, 80.0)],
    )


POINTS = [point(1, profile(0.5, "parse")), point(4, profile(0.25, "network"))]


def test_each_load_has_its_figures() -> None:
    first = POINTS[0]
    assert (first.load, first.failed, first.ttft_ms) == (1, 0, 1000)
    assert first.phases_ms == {"parse": 125}  # one of two requests went through it
    assert first.bubbles == {"decode-0 rank 0": 0.5} and first.control_us == {"decode-0 rank 0": 310}
    assert first.starved == pytest.approx(0.2)
    assert first.cpu_ms == {"gateway": pytest.approx(1.0)}  # 4 ms for 4 tokens


def test_the_table_has_a_column_per_load_and_says_what_was_not_seen() -> None:
    lines = {line[:38].strip(): line[38:].split() for line in table(POINTS)}
    assert lines["requests at a time"] == ["1", "4"]
    assert lines["decode-0 rank 0"] == ["310", "310"]  # the last of its three lines
    assert lines["parse"] == ["125.0", "–"] and lines["network"] == ["–", "125.0"]


def test_what_is_small_in_every_bar_is_drawn_together() -> None:
    bars = [{"a": 98.0, "b": 1.0, "c": 1.0}, {"a": 90.0, "b": 9.0, "c": 1.0}]
    assert large(bars) == [{"a": 98.0, "b": 1.0, "others": 1.0}, {"a": 90.0, "b": 9.0, "others": 1.0}]


def test_the_plot_names_all_it_shows() -> None:
    text = " ".join(ET.fromstring(plot(POINTS)).itertext())
    for name in ("parse", "network", "decode-0 rank 0", "gateway", "requests at a time"):
        assert name in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--loads", "1,2"], "--run-dir"),
        (["--stacks"], "--run-dir"),
        (["--allocations"], "--run-dir"),
        (["--run-dir", ".", "--plot", "x.svg"], "--plot needs --loads"),
        (["--run-dir", "/nonexistent", "--loads", "1"], "no cluster runs in /nonexistent"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], complaint: str) -> None:
    options = build_parser().parse_args(["bench", "profile", *arguments])
    with pytest.raises(SystemExit, match=complaint):
        options.run(options)
