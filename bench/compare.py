"""`paceline bench compare`: several servers under the same load, in turn, and their ratios to the first.

In: targets (URLs, or option sets of `paceline up`, for each of which a cluster is started here). Every round puts the
same requests on every target, in an order drawn anew, so that what slows the machine hits all alike; each round has
requests of its own, so that no cache answers twice. Out: per figure the median over the rounds, and the median of
the rounds' own ratios to the first target with a bootstrap confidence interval. Exit code 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import msgspec
import numpy

from bench.local_cluster import started_cluster
from bench.run import RunError, run
from bench.serve import plain, window_of
from bench.summary import Summary, summarise

_T = TypeVar("_T")
RESAMPLES, CONFIDENCE = 4000, 0.95
# Figure → how it is taken from a summary.
FIGURES: dict[str, Callable[[Summary], float]] = {
    "TTFT median, ms": lambda s: s.latency_ms["ttft"].median,
    "TTFT p99, ms": lambda s: s.latency_ms["ttft"].p99,
    "TPOT median, ms": lambda s: s.latency_ms["tpot"].median,
    "ITL p99, ms": lambda s: s.latency_ms["itl"].p99,
    "E2E median, ms": lambda s: s.latency_ms["e2e"].median,
    "output tokens/s": lambda s: s.output_tokens_per_s,
}


@dataclass(frozen=True, slots=True)
class Line:
    figure: str
    target: str
    median: float
    ratio: float  # median over the rounds of target / first
    low: float
    high: float


def compare(options: argparse.Namespace) -> int:
    targets = [parse_target(text) for text in options.targets]
    if len({name for name, _ in targets}) != len(targets):
        raise SystemExit("paceline bench: two targets have the same name")
    with ExitStack() as stack:
        urls = {name: _url(stack, what) for name, what in targets}
        try:
            rounds = asyncio.run(measured_rounds(options, urls))
        except (RunError, ValueError) as error:
            raise SystemExit(f"paceline bench: {error}") from error
    lines = lines_of(rounds, options.seed, FIGURES)
    print("\n".join(table(lines, options.rounds)))
    if confidence(options.rounds) < CONFIDENCE:
        print(f"note: {options.rounds} rounds give no interval of {CONFIDENCE:.0%}; 6 are needed", file=sys.stderr)
    if options.json is not None:
        body = {"options": {k: plain(v) for k, v in vars(options).items() if k not in ("api_key", "run")},
                "lines": lines, "rounds": rounds}  # fmt: skip
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")
    return int(any(summary.failed for each in rounds for summary in each.values()))


def parse_target(text: str) -> tuple[str, str]:
    name, equals, what = text.partition("=")
    if not equals or not name or not (what.startswith(("http://", "https://")) or what.split()[:1] == ["up"]):
        raise SystemExit(f"paceline bench: {text!r} is neither NAME=http://… nor NAME='up OPTIONS'")
    return name, what


def _url(stack: ExitStack, what: str) -> str:
    if what.startswith("http"):
        return what
    return stack.enter_context(started_cluster(shlex.split(what)[1:])).url


async def measured_rounds(options: argparse.Namespace, urls: dict[str, str]) -> list[dict[str, Summary]]:
    async def measure(name: str, number: int) -> Summary:
        finished = await run(options, urls[name], options.seed * 1000 + number)
        summary = summarise(finished.records, window_of(options.window, finished), dict(options.slo))
        print(f"round {number + 1} of {options.rounds}: {name}: {summary.completed} whole, {summary.failed} failed",
              file=sys.stderr, flush=True)  # fmt: skip
        return summary

    return await interleaved(list(urls), options.rounds, options.seed, measure)


async def interleaved(
    names: Sequence[str], rounds: int, seed: int, measure: Callable[[str, int], Awaitable[_T]]
) -> list[dict[str, _T]]:
    """`measure(name, round)` for every name in every round, in an order drawn anew."""
    chance = Random(f"{seed}/order")
    measured = []
    for number in range(rounds):
        found = {name: await measure(name, number) for name in chance.sample(names, len(names))}
        measured.append({name: found[name] for name in names})
    return measured


def lines_of(rounds: Sequence[Mapping[str, _T]], seed: int, figures: Mapping[str, Callable[[_T], float]]) -> list[Line]:
    """Figures that a round lacks (all of its requests failed, or had one token) are left out."""
    lines = []
    for figure, take in figures.items():
        try:
            values = {name: [take(each[name]) for each in rounds] for name in rounds[0]}
        except KeyError:
            continue
        lines += ratio_lines(figure, values, seed)
    return lines


def ratio_lines(figure: str, values: dict[str, list[float]], seed: int) -> list[Line]:
    """Per target its values of all rounds, compared with those of the first target."""
    lines = []
    first = next(iter(values.values()))
    for name, own in values.items():
        ratios = [value / base for value, base in zip(own, first, strict=True) if base]
        if ratios:
            low, high = median_interval(ratios, seed)
            lines.append(Line(figure, name, float(numpy.median(own)), float(numpy.median(ratios)), low, high))
    return lines


def median_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Percentile bootstrap of the median; the same seed gives the same interval."""
    data = numpy.asarray(values)
    drawn = numpy.random.default_rng(seed).integers(0, len(data), size=(RESAMPLES, len(data)))
    medians = numpy.median(data[drawn], axis=1)
    low, high = numpy.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def confidence(rounds: int) -> float:
    """Between the least and the greatest of n ratios lies their median with this probability; no interval has more."""
    return min(CONFIDENCE, 1 - 2.0 ** (1 - rounds))


def table(lines: Sequence[Line], rounds: int) -> list[str]:
    """One round has no interval."""
    level = confidence(rounds)
    rows = [
        f"{'figure':18} {'target':16} {'median':>10} {'ratio':>7}" + (f"  {100 * level:.3g}% interval" if level else "")
    ]
    for x in lines:
        interval = f"  {x.low:.3f} to {x.high:.3f}" if level else ""
        rows.append(f"{x.figure:18} {x.target:16} {x.median:10.2f} {x.ratio:7.3f}{interval}")
    return rows
