"""Prompts beside streams in virtual time, and which results count as a target missed."""

from __future__ import annotations

import asyncio

import pytest

from bench.client import Exchange
from bench.compare import Line
from bench.undivided import LEAST_ITL, OURS, THEIRS, Comparison
from bench.undivided_load import SETTLE, Mixed, Schedule, mix
from tests.bench.virtual_time import run_virtually

GAP, STALL = 0.1, 0.75
SCHEDULE = Schedule.spaced((100, 200), {100: 1.0, 200: 2.0}, 0.5)


class StallingServer:
    """A token every `GAP` for each stream, none for `STALL` from the moment a prompt comes; then that has its token."""

    def __init__(self, stall: float = STALL, stream_ends: str = "timeout") -> None:
        self._clock = asyncio.get_running_loop().time
        self._stall, self._stream_ends = stall, stream_ends
        self._free = 0.0  # when the stall ends

    async def stream(self, body: bytes) -> Exchange:
        until = self._clock() + SETTLE + SCHEDULE.seconds
        exchange = Exchange(error=self._stream_ends)
        while (now := self._clock()) < until:
            if now >= self._free:
                exchange.answer.chunks.append((now, 1))
            await asyncio.sleep(max(GAP, self._free - now))
        return exchange

    async def prompt(self, body: bytes) -> Exchange:
        exchange = Exchange(sent=self._clock())
        self._free = self._clock() + self._stall
        await asyncio.sleep(self._stall)
        exchange.answer.chunks.append((self._clock(), 1))
        exchange.answer.prompt_tokens = len(body.split(b"[")[1].split(b"]")[0].split(b","))
        return exchange


def mixed_with(**manner: float | str) -> Mixed:
    async def main() -> Mixed:
        server = StallingServer(**manner)
        return await mix(server.stream, server.prompt, "fake", 2, SCHEDULE, 0)

    return run_virtually(main())


def test_prompts_come_at_such_a_pace_that_their_share_of_the_time_is_as_asked() -> None:
    assert Schedule((100, 200), (0.0, 2.0), 6.0) == SCHEDULE


def test_gaps_of_all_streams_are_counted_from_the_first_moment_to_the_last() -> None:
    found = mixed_with()
    assert found.gaps.max / 1e3 == pytest.approx(STALL, abs=2 * GAP)
    assert found.gaps.median / 1e3 == pytest.approx(GAP)
    assert found.gaps.count == pytest.approx(2 * (SCHEDULE.seconds - 2 * STALL) / GAP, abs=8)
    assert found.ttft(100) / 1e3 == pytest.approx(STALL)
    assert found.ttft(200) / 1e3 == pytest.approx(STALL)


def test_without_a_stall_no_gap_is_longer_than_another() -> None:
    assert mixed_with(stall=0.0).gaps.max / 1e3 == pytest.approx(GAP)


def test_a_stream_that_ends_early_makes_the_run_void() -> None:
    with pytest.raises(SystemExit, match="a stream: ended before its time"):
        mixed_with(stream_ends="")


@pytest.mark.parametrize(
    ("figure", "target", "ratio", "missed"),
    [
        ("TTFT, ms", OURS, 1.03, []),
        ("TTFT, ms", OURS, 1.031, ["alone: TTFT, ms: 1.031 of the undivided engine's, not 1.03"]),
        ("second token, ms", OURS, 1.5, []),
        ("ITL p99, ms", THEIRS, LEAST_ITL, []),
        ("ITL p99, ms", THEIRS, 1.2, [f"alone: ITL p99, ms: better by 1.20, not {LEAST_ITL}"]),
    ],
)
def test_a_target_is_missed_by_the_median_ratio(figure: str, target: str, ratio: float, missed: list[str]) -> None:
    comparison = Comparison("model", {}, 1)
    comparison.parts["alone"] = [Line(figure, target, 100.0, ratio, ratio, ratio)]
    assert comparison.missed() == missed
