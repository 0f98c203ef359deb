"""Comparisons: the same requests for every target of a round, and ratios that can be counted by hand."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from bench.compare import FIGURES, lines_of, measured_rounds, parse_target, table
from bench.records import Record
from bench.summary import Summary, summarise, whole_run
from paceline.cli import build_parser
from tests.bench.fake_server import FakeServer


def answered(ttft: float) -> Summary:
    record = Record(
        index=0, scheduled=0.0, sent=0.0, ended=2 * ttft, chunks=((ttft, 1), (2 * ttft, 1)), output_tokens=2,
        asked_tokens=2,
    )  # fmt: skip
    return summarise([record], whole_run([record]), {})


def test_ratios_are_taken_within_a_round() -> None:
    """The machine is ten times slower in the second round; the ratio is the same in all, and that is what is shown."""
    rounds = [{"a": answered(slow), "b": answered(1.5 * slow)} for slow in (1.0, 10.0, 2.0)]
    found = {(line.figure, line.target): line for line in lines_of(rounds, 1, FIGURES)}
    line = found["TTFT median, ms", "b"]
    assert line.median == pytest.approx(3000)
    assert (line.ratio, line.low, line.high) == pytest.approx((1.5, 1.5, 1.5))
    assert found["output tokens/s", "b"].ratio == pytest.approx(1 / 1.5)
    assert found["TTFT median, ms", "a"].ratio == 1.0
    assert any("1.500" in row for row in table(lines_of(rounds, 1, FIGURES), 3))


@pytest.mark.parametrize(
    ("count", "header"),
    [(1, None), (2, "50% interval"), (5, "93.8% interval"), (6, "95% interval"), (9, "95% interval")],
)
def test_the_table_promises_no_interval_that_the_rounds_cannot_give(count: int, header: str | None) -> None:
    rounds = [{"a": answered(1.0), "b": answered(1.0 + number)} for number in range(count)]
    first, *rows = table(lines_of(rounds, 1, FIGURES), count)
    assert first.endswith(header) if header else "interval" not in first
    if count < 6:  # the promise is that of the least and the greatest ratio, so these are what is shown
        shown = f"1.000 to {float(count):.3f}" if header else "   1.000"
        assert any(shown in row for row in rows)


def test_the_interval_holds_the_ratios_that_were_seen() -> None:
    ratios = (1.0, 1.2, 1.4, 1.1, 1.3)
    rounds = [{"a": answered(1.0), "b": answered(ratio)} for ratio in ratios]
    line = next(line for line in lines_of(rounds, 1, FIGURES) if line.target == "b")
    assert line.ratio == pytest.approx(1.2)
    assert 1.0 <= line.low < line.ratio < line.high <= 1.4


def test_every_target_of_a_round_gets_the_same_requests_and_every_round_others() -> None:
    async def main() -> tuple[FakeServer, FakeServer, list[dict[str, Summary]]]:
        async with AsyncExitStack() as stack:
            one, two = [await stack.enter_async_context(FakeServer().serving()) for _ in range(2)]
            options = build_parser().parse_args(
                ["bench", "compare", "a=http://x", "--rounds", "3", "--requests", "4", "--concurrency", "1",
                 "--output", "2", "--warmup", "0"]
            )  # fmt: skip
            return one, two, await measured_rounds(options, {"a": one.url, "b": two.url})

    one, two, rounds = asyncio.run(main())
    assert one.bodies == two.bodies
    assert len({str(body["prompt"]) for body in one.bodies}) == 12
    assert [{name: s.completed for name, s in each.items()} for each in rounds] == [{"a": 4, "b": 4}] * 3


@pytest.mark.parametrize("text", ["http://x", "=http://x", "a=", "a=down --x", "a=upwards"])
def test_a_target_is_a_name_and_a_url_or_options(text: str) -> None:
    with pytest.raises(SystemExit, match="is neither"):
        parse_target(text)


def test_targets_keep_their_options() -> None:
    assert parse_target("b=up --decode-pp 1") == ("b", "up --decode-pp 1")
    assert parse_target("a=https://x/v1?y=1") == ("a", "https://x/v1?y=1")
