"""The figures, against values counted by hand and by the standard library."""

from __future__ import annotations

import statistics
from pathlib import Path
from random import Random

import pytest

from bench.compare import median_interval
from bench.records import Record, read_records, write_records
from bench.summary import Window, distribution, most_in_flight, steady_state, summarise, whole_run


def record(index: int, scheduled: float, *chunks: tuple[float, int], error: str = "", **more: object) -> Record:
    """Sent as scheduled; ends with its last token, or a second after it began."""
    fields = {
        "sent": scheduled, "ended": chunks[-1][0] if chunks else scheduled + 1, "prompt_tokens": 10,
        "output_tokens": sum(tokens for _, tokens in chunks), "asked_tokens": sum(tokens for _, tokens in chunks),
    }  # fmt: skip
    return Record(index=index, scheduled=scheduled, chunks=chunks, error=error, **(fields | more))  # type: ignore[arg-type]


def test_a_request_by_hand() -> None:
    """Due at 1, sent at 1.5, tokens at 2, 3 (three together) and 6."""
    found = record(0, 1.0, (2.0, 1), (3.0, 3), (6.0, 1), sent=1.5)
    assert found.ttft == 1.0
    assert found.latency == 5.0
    assert found.tpot == 1.0  # 4 s for the 4 tokens after the first
    assert found.gaps == [1.0, 0.0, 0.0, 3.0]


def test_gaps_are_one_fewer_than_tokens_and_sum_up_to_what_tpot_divides() -> None:
    found = record(0, 0.0, (2.0, 2), (3.0, 3), (6.0, 1))
    assert len(found.gaps) == found.output_tokens - 1
    assert sum(found.gaps) == pytest.approx((found.tpot or 0) * (found.output_tokens - 1))


def test_one_token_has_no_tpot_and_no_gap() -> None:
    found = record(0, 0.0, (2.0, 1))
    assert (found.tpot, found.gaps) == (None, [])


def test_distributions_equal_the_standard_library_s() -> None:
    chance = Random(1)
    values = [chance.expovariate(1.0) for _ in range(101)]
    found = distribution(values)
    assert found is not None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx([cuts[49], cuts[89], cuts[94], cuts[98]])
    assert (found.mean, found.std) == pytest.approx((statistics.fmean(values), statistics.pstdev(values)))
    assert found.median == statistics.median(values)
    assert distribution([]) is None


RUN = [
    record(0, 0.0, (1.0, 1), (2.0, 1)),
    record(1, 1.0, (3.0, 1), (5.0, 1)),
    record(2, 2.0, (3.0, 1), (10.0, 1)),
    record(3, 3.0, error="http_503"),
]


def test_a_run_by_hand() -> None:
    found = summarise(RUN, whole_run(RUN), {"ttft": 1000.0, "tpot": 3000.0})
    assert (found.requests, found.completed, found.failed, found.errors) == (4, 3, 1, {"http_503": 1})
    assert found.latency_ms["ttft"].mean == pytest.approx((1000 + 2000 + 1000) / 3)
    assert found.latency_ms["tpot"].median == 2000.0
    assert found.latency_ms["e2e"].max == 8000.0
    assert found.request_rate == pytest.approx(3 / 10)
    assert found.output_tokens_per_s == pytest.approx(6 / 10)
    assert found.input_tokens_per_s == pytest.approx(30 / 10)
    assert found.total_tokens_per_s == pytest.approx(36 / 10)
    assert found.most_in_flight == 3


def test_goodput_counts_what_keeps_every_limit_among_all_that_were_due() -> None:
    """Request 1 is too late with its first token, request 2 too slow after it, request 3 failed."""
    found = summarise(RUN, whole_run(RUN), {"ttft": 1000.0, "tpot": 3000.0})
    assert found.goodput is not None
    assert found.goodput.share == 0.25
    assert found.goodput.requests_per_s == pytest.approx(1 / 10)


def test_steady_state_lies_between_the_first_answer_and_the_last_request() -> None:
    window = steady_state(RUN)
    assert (window.begin, window.end) == (2.0, 3.0)
    found = summarise(RUN, window, {})
    assert (found.requests, found.completed) == (1, 1)  # the one due at 2
    assert found.output_tokens_per_s == 3.0  # those at 2, 3 and 3


def test_a_run_without_a_steady_state_says_so() -> None:
    with pytest.raises(ValueError, match="too short for a steady state"):
        steady_state([record(0, 0.0, (1.0, 1)), record(1, 0.0, (1.0, 1))])


def test_answers_shorter_than_asked_are_counted() -> None:
    assert summarise([record(0, 0.0, (1.0, 1), asked_tokens=5)], Window("all", 0.0, 2.0), {}).short == 1


def test_unknown_input_tokens_are_not_made_up() -> None:
    found = summarise([record(0, 0.0, (1.0, 1), prompt_tokens=None)], Window("all", 0.0, 2.0), {})
    assert found.input_tokens_per_s is None
    assert found.total_tokens_per_s is None


def test_in_flight_counts_what_overlaps() -> None:
    assert most_in_flight([record(n, n * 0.5, (n * 0.5 + 1.2, 1)) for n in range(6)]) == 3


def test_records_survive_their_file(tmp_path: Path) -> None:
    write_records(tmp_path / "r.jsonl", RUN)
    assert read_records(tmp_path / "r.jsonl") == RUN


def test_the_bootstrap_interval_of_a_median_covers_it_as_often_as_it_says() -> None:
    chance = Random(5)
    covered = 0
    for trial in range(200):
        low, high = median_interval([chance.gauss(1.0, 0.1) for _ in range(15)], trial)
        covered += low <= 1.0 <= high
    assert 180 <= covered <= 199
    assert median_interval([1.0, 2.0, 3.0], 1) == median_interval([1.0, 2.0, 3.0], 1)
