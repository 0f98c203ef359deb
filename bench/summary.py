"""The figures of a run. Pure.

In: the records of a run. Out: a `Summary`: distributions of the latencies, throughputs, goodput, kinds of error. Times
are in milliseconds, throughputs per second. What each figure means is in docs/benchmark.md; all latencies
count from the scheduled moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy

from bench.records import Record

PERCENTILES = (50, 90, 95, 99)


class Distribution(msgspec.Struct, frozen=True):
    count: int
    mean: float
    median: float
    std: float  # of the population
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float


class Window(msgspec.Struct, frozen=True):
    """The part of a run that is counted: [begin, end) in seconds."""

    kind: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Goodput(msgspec.Struct, frozen=True):
    limits_ms: dict[str, float]
    share: float  # of the requests of the window, failed ones included
    requests_per_s: float


class Summary(msgspec.Struct, frozen=True):
    window: Window
    requests: int  # scheduled in the window
    completed: int
    failed: int
    errors: dict[str, int]
    short: int  # answers with fewer tokens than were asked for
    latency_ms: dict[str, Distribution]  # ttft, tpot, itl, e2e, send_lag
    request_rate: float  # completed in the window
    offered_rate: float  # scheduled in the window
    input_tokens_per_s: float | None  # None if the server did not say how many there were
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    most_in_flight: int
    goodput: Goodput | None


def distribution(values: Sequence[float]) -> Distribution | None:
    """Percentiles between two values are interpolated linearly."""
    if not len(values):
        return None
    data = numpy.asarray(values, dtype=float)
    p50, p90, p95, p99 = (float(value) for value in numpy.percentile(data, PERCENTILES))
    mean, std = float(data.mean()), float(data.std())
    return Distribution(len(data), mean, p50, std, p50, p90, p95, p99, float(data.min()), float(data.max()))


def whole_run(records: Sequence[Record]) -> Window:
    return Window("all", 0.0, max((record.ended for record in records), default=0.0))


def steady_state(records: Sequence[Record]) -> Window:
    """From the first answer that is whole until the last request is due: neither filling nor draining."""
    begin = min((record.ended for record in records if record.ok), default=0.0)
    end = max((record.scheduled for record in records), default=0.0)
    if end <= begin:
        raise ValueError(
            "the run is too short for a steady state: its last request was due before the first answer ended"
        )
    return Window("steady", begin, end)


def summarise(records: Sequence[Record], window: Window, limits_ms: dict[str, float]) -> Summary:
    """`limits_ms`: for goodput; names of `of_request`."""
    inside = [record for record in records if window.begin <= record.scheduled < window.end]
    good = [record for record in inside if record.ok]
    ended = [record for record in records if record.ok and window.begin <= record.ended <= window.end]
    seconds = max(window.seconds, 1e-9)
    values: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2e": [], "send_lag": []}
    for record in good:
        for name, value in of_request(record).items():
            values[name].append(value)
        values["itl"] += [1e3 * gap for gap in record.gaps]
    values["send_lag"] = [1e3 * (record.sent - record.scheduled) for record in inside]
    output = sum(n for record in records for at, n in record.chunks if window.begin <= at <= window.end) / seconds
    known = all(record.prompt_tokens is not None for record in ended)
    # A prompt counts when its first token is out: then it was computed.
    prompts = [r for r in records if r.chunks and window.begin <= r.chunks[0][0] <= window.end]
    inputs = sum(record.prompt_tokens or 0 for record in prompts) / seconds if known else None
    met = sum(all(of_request(r).get(name, 0.0) <= most for name, most in limits_ms.items()) for r in good)
    return Summary(
        window=window,
        requests=len(inside),
        completed=len(good),
        failed=len(inside) - len(good),
        errors=dict(sorted(Counter(record.error for record in inside if not record.ok).items())),
        short=sum(record.output_tokens < record.asked_tokens for record in good),
        latency_ms={name: found for name, each in values.items() if (found := distribution(each)) is not None},
        request_rate=len(ended) / seconds,
        offered_rate=len(inside) / seconds,
        input_tokens_per_s=inputs,
        output_tokens_per_s=output,
        total_tokens_per_s=None if inputs is None else inputs + output,
        most_in_flight=most_in_flight(records),
        goodput=Goodput(limits_ms, met / len(inside), met / seconds) if limits_ms and inside else None,
    )


def of_request(record: Record) -> dict[str, float]:
    """A request's own latencies in ms; what it has none of (a gap, with one token) is left out."""
    found = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.latency}
    return {name: 1e3 * value for name, value in found.items() if value is not None}


def most_in_flight(records: Sequence[Record]) -> int:
    steps = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most
