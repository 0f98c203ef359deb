"""The figures of `paceline top`: rates from two looks, quantiles from histograms.

In: looks. Out: lines and rows of text. Pure but for `read_metrics`, which asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # (name, sorted labels) → value
HEADINGS = ("rank", "tick/s", "tok/s", "batch", "pages used", "bubbles", "KV/s", "queued", "doing")


@dataclass(frozen=True, slots=True)
class Look:
    at: float  # monotonic
    report: dict[str, Any]  # of `paceline.status`
    metrics: Series  # of the gateway; empty if there is none


async def read_metrics(url: str | None, timeout: float) -> Series:
    if url is None:
        return {}
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:
            async with session.get(url) as response:
                text = await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return {}
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Of a histogram's cumulative buckets by upper bound, as Prometheus interpolates; None: it is empty."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total:
        return None
    below, lower = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= q * total:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (q * total - below) / (buckets[bound] - below)
        below, lower = buckets[bound], bound
    return lower


def gateway_lines(before: Look | None, now: Look) -> list[str]:
    report = now.report
    if not report["gateway"]:
        return []
    if not now.metrics:
        return [f"gateway    {report['gateway']}   {report['gateway_status']}"]
    tokens = _rate(before, now, "paceline_gateway_output_tokens_total")
    inflight = now.metrics.get(("paceline_gateway_requests_in_flight", ()), 0.0)
    line = f"gateway    {report['gateway']}   {report['gateway_status']}   {inflight:.0f} in flight   {tokens} tok/s"
    for name, text in (("time_to_first_token_seconds", "TTFT"), ("inter_token_seconds", "ITL")):
        line += f"   {text} p50 {_ms(quantile(_buckets(before, now, f'paceline_gateway_{name}', ()), 0.5))}"
    lines = [line]
    phase = "paceline_gateway_phase_seconds"
    parts = sorted({dict(labels)["phase"] for name, labels in now.metrics if name == f"{phase}_sum"})
    medians = {part: quantile(_buckets(before, now, phase, (("phase", part),)), 0.5) for part in parts}
    told = [f"{part} {_ms(median)}" for part, median in medians.items() if median is not None]
    return [*lines, f"  p50 of phases: {', '.join(told)}"] if told else lines


def rank_rows(before: Look | None, now: Look, instance: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [HEADINGS]
    for rank in instance["ranks"]:
        if not rank["answered"]:
            rows.append((str(rank["rank"]), "NO ANSWER", *("-" for _ in HEADINGS[2:])))
            continue
        grown = _grown(before, now, instance, rank)
        ticks, tokens = grown.get("ticks"), None
        if grown:
            tokens = grown["prompt_tokens_computed"] + grown["tokens_generated"]
        seconds = now.at - before.at if before else 1.0
        flight = grown.get("in_flight_us", 0)
        pages, total = rank["pages"], sum(rank["pages"].values())
        rows.append(
            (
                str(rank["rank"]),
                _per(ticks, seconds),
                _per(tokens, seconds),
                f"{tokens / ticks:.1f}" if ticks and tokens is not None else "-",
                f"{total - pages.get('free', 0)} of {total}",
                f"{max(0.0, 1 - grown['compute_us'] / flight):.0%}" if flight else "-",
                _size(grown["kv_bytes_sent"] / seconds) if "kv_bytes_sent" in grown else "-",
                str(sum(n for name, n in rank["queues"].items() if name != "log_unacknowledged")),
                rank["executing"] or "-",
            )
        )
    return rows


def _grown(before: Look | None, now: Look, instance: dict[str, Any], rank: dict[str, Any]) -> dict[str, int]:
    """Counters since the look before; empty if there was none of the same ranks."""
    if before is None:
        return {}
    for other in before.report["instances"]:
        if (other["address"], other["epoch"]) != (instance["address"], instance["epoch"]):
            continue
        for old in other["ranks"]:
            if old["rank"] == rank["rank"] and old["counters"].keys() == rank["counters"].keys():
                return {name: count - old["counters"][name] for name, count in rank["counters"].items()}
    return {}


def _rate(before: Look | None, now: Look, name: str) -> str:
    if before is None or (name, ()) not in before.metrics:
        return "-"
    return _per(now.metrics.get((name, ()), 0.0) - before.metrics[name, ()], now.at - before.at)


def _buckets(before: Look | None, now: Look, name: str, labels: tuple[tuple[str, str], ...]) -> dict[float, float]:
    """Of the time between two looks, if anything came in it; else of all time."""

    def read(series: Series) -> dict[float, float]:
        return {
            float(found["le"]): value
            for (of, pairs), value in series.items()
            if of == f"{name}_bucket" and set(labels) <= set((found := dict(pairs)).items())
        }

    whole = read(now.metrics)
    earlier = read(before.metrics) if before else {}
    recent = {bound: value - earlier.get(bound, 0.0) for bound, value in whole.items()}
    return recent if before and any(recent.values()) else whole


def _per(count: float | None, seconds: float) -> str:
    return "-" if count is None else f"{count / seconds:.1f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _size(bytes_: float) -> str:
    return f"{bytes_ / 1e6:.1f} MB"
