"""`paceline bench profile --loads`: where the time goes, against the number of requests at a time.

In: the options of `profile`; each load is a closed loop of its own, from the least to the greatest. Out: a `Point` per
load, as a table, as JSON and as a plot: the parts of the time to the first token, the share of bubbles of each rank,
what a microbatch costs each control loop, and the CPU time that an output token costs each kind of process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from bench.breakdown import Profile, observe
from bench.serve import plain

_PHASES, _FIRST_TOKENS = "paceline_gateway_phase_seconds", "paceline_gateway_time_to_first_token_seconds"
_SMALL = 0.02  # of the whole bar at every load: drawn with the others that are as small


@dataclass(frozen=True, slots=True)
class Point:
    load: int
    failed: int
    output_tokens_per_s: float
    ttft_ms: float  # medians
    itl_ms: float
    phases_ms: dict[str, float]  # parts of the mean time to the first token at the gateway; they add up to it
    bubbles: dict[str, float]  # share of the time in flight, by rank
    control_us: dict[str, float]  # per microbatch, by rank
    rows: dict[str, float]  # per microbatch, by rank
    cpu_ms: dict[str, float]  # per output token, by process
    starved: float  # share of the time that all processes wanted a processor in which they had none


def sweep(options: argparse.Namespace) -> int:
    points = []
    for load in sorted(options.loads):
        print(f"note: {load} at a time", file=sys.stderr)
        one = argparse.Namespace(**vars(options) | {"concurrency": load, "rate": None, "ramp": None})
        points.append(point(load, observe(one)))
    print("\n".join(table(points)))
    if options.json is not None:
        told = {name: plain(value) for name, value in vars(options).items() if name not in ("api_key", "run")}
        body = msgspec.json.encode({"options": told, "points": points})
        options.json.write_bytes(msgspec.json.format(body, indent=1) + b"\n")
    if options.plot is not None:
        options.plot.write_text(plot(points))
    return int(any(point.failed for point in points))


def point(load: int, seen: Profile) -> Point:
    # A phase that only some requests go through is shared out over all.
    answered = max((phase.count for phase in seen.phases if phase.name == _FIRST_TOKENS), default=0.0)
    phases = {
        json.loads(phase.labels)["phase"]: 1e3 * phase.mean * phase.count / answered
        for phase in seen.phases
        if phase.name == _PHASES and answered
    }
    latency, starved = seen.summary.latency_ms, sum(process.starved_seconds for process in seen.processes)
    return Point(
        load=load,
        failed=seen.summary.failed,
        output_tokens_per_s=seen.summary.output_tokens_per_s,
        ttft_ms=latency["ttft"].median if "ttft" in latency else 0.0,
        itl_ms=latency["itl"].median if "itl" in latency else 0.0,
        phases_ms=phases,
        bubbles={rank.name: rank.bubble_fraction for rank in seen.ranks},
        control_us={rank.name: rank.control_us_per_tick for rank in seen.ranks},
        rows={rank.name: rank.rows_per_tick for rank in seen.ranks},
        starved=starved / max(1e-9, starved + sum(process.cpu_seconds for process in seen.processes)),
        cpu_ms={process.name: 1e3 * process.cpu_seconds / seen.tokens for process in seen.processes},
    )


def table(points: Sequence[Point]) -> Iterator[str]:
    def row(name: str, value: Callable[[Point], float | None], form: str) -> str:
        cells = (value(point) for point in points)
        return f"{name:38}" + "".join(f"{'–' if cell is None else format(cell, form):>10}" for cell in cells)

    yield row("requests at a time", lambda point: point.load, "d")
    yield row("output tokens/s", lambda point: point.output_tokens_per_s, ".1f")
    yield row("TTFT, median, ms", lambda point: point.ttft_ms, ".0f")
    yield row("ITL, median, ms", lambda point: point.itl_ms, ".1f")
    yield row("without a processor", lambda point: point.starved, ".1%")
    for title, field, form in (
        ("ms of TTFT, mean", "phases_ms", ".1f"),
        ("bubbles", "bubbles", ".1%"),
        ("rows per microbatch", "rows", ".1f"),
        ("µs of control per microbatch", "control_us", ".0f"),
        ("CPU ms per output token", "cpu_ms", ".3f"),
    ):
        yield title
        for name in _names(points, field):
            yield row(f"  {name}", lambda point, name=name, field=field: getattr(point, field).get(name), form)  # type: ignore[misc]


def _names(points: Sequence[Point], field: str) -> list[str]:
    return list(dict.fromkeys(name for point in points for name in getattr(point, field)))


def large(bars: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Each bar with its small parts put together."""
    shown = {name for bar in bars for name, part in bar.items() if part >= _SMALL * sum(bar.values())}
    return [
        {name: part for name, part in bar.items() if name in shown}
        | {"others": sum(part for name, part in bar.items() if name not in shown)}
        for bar in bars
    ]


def plot(points: Sequence[Point]) -> str:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.report import as_svg

    loads = [str(point.load) for point in points]

    def lines(axes: Axes, field: str, scale: float) -> None:
        for name in _names(points, field):
            axes.plot(
                loads, [scale * getattr(point, field).get(name, float("nan")) for point in points], ".-", label=name
            )

    def stacked(axes: Axes, bars: Sequence[dict[str, float]]) -> None:
        base = [0.0] * len(bars)
        for name in dict.fromkeys(name for bar in bars for name in bar):
            heights = [bar.get(name, 0.0) for bar in bars]
            axes.bar(loads, heights, bottom=base, label=name)
            base = [low + height for low, height in zip(base, heights, strict=True)]

    def draw(figure: Figure) -> None:
        ((first, second), (third, fourth)) = figure.subplots(2, 2)
        stacked(first, large([point.phases_ms for point in points]))
        first.set(title="Time to the first token, by phase (means)", ylabel="ms")
        lines(second, "bubbles", 100)
        second.set(title="Bubbles: in flight, and nothing computed", ylabel="% of time in flight", ylim=(0, 100))
        lines(third, "control_us", 1)
        third.set(title="Control loop, per microbatch", ylabel="µs of CPU", ylim=(0, None))
        stacked(fourth, large([point.cpu_ms for point in points]))
        fourth.set(title="Processor time per output token", ylabel="ms")
        for axes in (first, second, third, fourth):
            axes.set_xlabel("requests at a time")
            axes.legend(fontsize=7)

    return as_svg(draw, (11, 7.5))
