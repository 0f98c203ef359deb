"""`paceline top`: quantiles as Prometheus makes them, rates of two looks, and what cannot be known is a dash."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.top import render
from paceline.top_figures import Look, Series, quantile, rank_rows

INF = float("inf")


def test_quantiles_are_interpolated_within_the_bucket() -> None:
    buckets = {0.1: 10.0, 0.2: 30.0, 0.5: 40.0, INF: 40.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.15)
    assert quantile(buckets, 0.25) == pytest.approx(0.1)
    assert quantile(buckets, 1.0) == pytest.approx(0.5)
    assert quantile({0.1: 1.0, INF: 10.0}, 0.9) == pytest.approx(0.1), "nothing is known above the last bound"
    assert quantile({0.1: 0.0, INF: 0.0}, 0.5) is None and quantile({}, 0.5) is None


def rank(**counters: int) -> dict[str, Any]:
    known = {"ticks": 0, "prompt_tokens_computed": 0, "tokens_generated": 0, "in_flight_us": 0, "compute_us": 0}
    return {
        "rank": 0, "answered": True, "queues": {"executor": 2, "log_unacknowledged": 9}, "requests": {"running": 3},
        "pages": {"free": 60, "owned": 4}, "counters": known | counters, "executing": "tick 9",
    }  # fmt: skip


def look(at: float, ranks: list[dict[str, Any]], epoch: int = 1, metrics: Series | None = None) -> Look:
    instance = {
        "instance": "decode-0", "role": "decode", "address": "a:1", "epoch": epoch, "phase": "serving", "error": "",
        "restarts": 0, "ranks": ranks,
    }  # fmt: skip
    report = {"gateway": "http://g", "gateway_status": "ok", "instances": [instance]}
    return Look(at, report, metrics or {})


def test_rates_are_differences_of_two_looks_of_one_incarnation() -> None:
    before = look(10.0, [rank(ticks=5, tokens_generated=100)])
    now = look(12.0, [rank(ticks=15, tokens_generated=180, in_flight_us=1_000_000, compute_us=750_000)])
    instance = now.report["instances"][0]
    assert rank_rows(before, now, instance)[1] == ("0", "5.0", "40.0", "8.0", "4 of 64", "25%", "-", "2", "tick 9")
    restarted = look(12.0, [rank(ticks=1)], epoch=2)
    assert rank_rows(before, restarted, restarted.report["instances"][0])[1][1:4] == ("-", "-", "-")


def test_an_instance_or_rank_that_does_not_answer_is_said() -> None:
    silent = look(1.0, [rank() | {"answered": False}])
    assert "NO ANSWER" in render(None, silent)
    gone = look(1.0, [])
    gone.report["instances"][0]["error"] = "no answer"
    assert "decode-0   decode   NO ANSWER" in render(None, gone)


def test_the_gateways_medians_are_of_the_time_between_the_looks() -> None:
    def series(slow: float, fast: float) -> Series:
        name = "paceline_gateway_time_to_first_token_seconds_bucket"
        bounds = {"0.1": fast, "1.0": fast + slow, "+Inf": fast + slow}
        return {(name, (("le", bound),)): count for bound, count in bounds.items()}

    before, now = look(1.0, [rank()], metrics=series(100, 0)), look(2.0, [rank()], metrics=series(100, 10))
    assert "TTFT p50 50.0 ms" in render(before, now)
    assert "TTFT p50 550.0 ms" in render(None, before), "of all time, where there is nothing to compare with"
