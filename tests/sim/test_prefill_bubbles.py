"""A prefill pipeline of eight ranks adds next to nothing to the time of its devices. All times here are virtual."""

from __future__ import annotations

import pytest

from sim.case import MS
from sim.prefill_bubbles import LIMIT, LONG, STREAM, ideal, measure

FORWARD = 50 * MS


def recurrence(stages: tuple[int, ...], chunks: int) -> int:
    """A chunk enters a stage when it has left the stage before and the chunk before has left this one."""
    free = [0] * len(stages)
    for _ in range(chunks):
        left = 0
        for stage, takes in enumerate(stages):
            left = free[stage] = max(left, free[stage]) + takes
    return free[-1]


@pytest.mark.parametrize("stages", [(50,) * 8, (50, 50, 60), (60, 50, 50), (7,)])
def test_the_ideal_is_what_the_recurrence_without_messages_gives(stages: tuple[int, ...]) -> None:
    assert [ideal(stages, chunks) for chunks in (1, 2, 16)] == [recurrence(stages, chunks) for chunks in (1, 2, 16)]


@pytest.mark.sim
@pytest.mark.parametrize(
    ("prompts", "stages"),
    [
        (LONG, (FORWARD,) * 8),
        (STREAM[:24], (FORWARD,) * 8),
        (STREAM[:24], (*(FORWARD,) * 7, FORWARD * 6 // 5)),
        (LONG, (FORWARD,) * 2),
    ],
    ids=["a long prompt", "a queue of prompts", "a slower last rank", "two ranks"],
)
def test_prefill_keeps_its_devices_busy(prompts: tuple[int, ...], stages: tuple[int, ...]) -> None:
    passage = measure("", prompts, stages)
    assert passage.chunks <= -(-sum(prompts) // 8) + 2
    assert LIMIT <= passage.of_ideal <= 1


@pytest.mark.sim
def test_what_messages_cost_would_show() -> None:
    """Forwards of 2 ms are no match for a chain of eight hops: the measurement says so."""
    assert measure("", STREAM[:24], (2 * MS,) * 8).of_ideal < 0.9
