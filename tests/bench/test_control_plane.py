"""The targets of the control plane, on made-up figures: each can be missed."""

from __future__ import annotations

from typing import Any

import pytest

from bench.control_plane import RUNNING, WAITING, middle_of, misses

ROWS = {16: 5.0, 64: 21.0, 256: 85.0}


def costs(**over: float) -> list[dict[str, Any]]:
    """9 µs per row everywhere (median; 10 in the mean), but for what is said of `r<running>w<waiting>`."""
    return [
        {"running": running, "rows": ROWS[running],
         "median_us": [1.0, over.get(f"r{running}w{waiting}", 9.0 * ROWS[running])],
         "mean_us": [1.0, over.get(f"mean_r{running}w{waiting}", 10.0 * ROWS[running])]}
        for running in RUNNING for waiting in WAITING
    ]  # fmt: skip


def test_good_figures_miss_nothing() -> None:
    assert misses(costs()) == []


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"r64w1000": 201.0}, "201 µs at 64 running and 1000 waiting; the limit is 200"),
        ({"mean_r256w1000": 11.1 * 85}, "11.1 µs per row at 256 running, 10.0 at 64"),
        ({"r16w10000": 70.0}, "70 µs at 16 running and 10000 waiting, 45 at 1000"),
    ],
)
def test_each_target_can_be_missed(over: dict[str, float], message: str) -> None:
    assert misses(costs(**over)) == [message]


def test_an_outlier_among_the_rounds_does_not_count() -> None:
    rounds = [
        {"running": 64, "rows": 21.0, "median_us": [value, 2.0], "mean_us": [value, 3.0]} for value in (9.0, 5.0, 6.0)
    ]
    assert middle_of(rounds) == {"running": 64, "rows": 21.0, "median_us": [6.0, 2.0], "mean_us": [6.0, 3.0]}
