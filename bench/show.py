"""A run's summary as text: the table at the end, and the live line. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from bench.load import Progress
from bench.records import Record
from bench.summary import Summary

NAMES = {
    "ttft": "TTFT", "tpot": "TPOT (without the first)", "itl": "ITL (every gap)", "e2e": "E2E latency",
    "send_lag": "sent late by",
}  # fmt: skip
_LATE_MS = 20.0  # of p99: then this client, or its host, was the bottleneck


def table(summary: Summary) -> Iterator[str]:
    window = summary.window
    yield (
        f"{summary.requests} requests, {summary.completed} whole, {summary.failed} failed;"
        f" window {window.kind}: {window.begin:.2f} to {window.end:.2f} s; at most {summary.most_in_flight} in flight"
    )
    for kind, count in summary.errors.items():
        yield f"  {kind}: {count}"
    if summary.short:
        yield f"  {summary.short} answers are shorter than was asked for"
    yield f"{'ms':26}" + "".join(f"{name:>10}" for name in ("mean", "median", "std", "p90", "p95", "p99"))
    for name, shown in NAMES.items():
        if (d := summary.latency_ms.get(name)) is not None:
            yield f"{shown:26}" + "".join(f"{v:10.2f}" for v in (d.mean, d.median, d.std, d.p90, d.p95, d.p99))
    yield f"requests/s {summary.request_rate:.3f} (offered {summary.offered_rate:.3f})"
    known = summary.input_tokens_per_s is not None
    total = f", input {summary.input_tokens_per_s:.1f}, total {summary.total_tokens_per_s:.1f}" if known else ""
    yield f"tokens/s   output {summary.output_tokens_per_s:.1f}{total}"
    if summary.goodput is not None:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in summary.goodput.limits_ms.items())
        yield f"goodput    {summary.goodput.requests_per_s:.3f} requests/s, {summary.goodput.share:.1%} ({limits})"


def warnings(
    summary: Summary, records: Sequence[Record], open_loop: bool, left_out: int, held_back: bool
) -> Iterator[str]:
    if left_out:
        yield f"{left_out} requests of the trace were left out: longer than --max-input"
    lag = summary.latency_ms.get("send_lag")
    if open_loop and not held_back and lag is not None and lag.p99 > _LATE_MS:
        yield f"1 in 100 requests was sent {lag.p99:.0f} ms late or more: the measuring process needs more CPU"
    for kind in summary.errors:
        first = next(record for record in records if record.error == kind)
        yield f"{kind}, the first of {summary.errors[kind]}: {first.reason}"
    if summary.completed and summary.input_tokens_per_s is None:
        yield "the server sends no usage: output tokens were counted as events, input tokens are unknown"


def live_line(seconds: float, progress: Progress) -> str:
    done = progress.records
    firsts = [1e3 * ttft for record in done[-50:] if (ttft := record.ttft) is not None]
    recent = f", TTFT {median(firsts):.0f} ms" if firsts else ""
    return (
        f"{seconds:6.0f} s  sent {progress.sent}/{progress.planned}, in flight {progress.sent - len(done)},"
        f" done {len(done)}, failed {progress.errors}, {progress.tokens} tokens{recent}"
    )
