"""`paceline bench profile`: where the time of a load goes.

In: a server, the options of `bench serve`, and, for a cluster on this machine, its run directory. Out, besides what
`serve` tells: per Prometheus histogram of the server the mean of what was observed during the load, per process the CPU
seconds used during the load and per output token. Samples are differences between a reading before and one after.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass

import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.idle_cpu import cluster_pids, descendants, read_sample
from bench.serve import check_plots, keep, measured
from bench.show import table

_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Observed:
    """A histogram or summary of the server, over the load."""

    name: str
    labels: str
    count: float
    mean: float


@dataclass(frozen=True, slots=True)
class Used:
    pid: int
    name: str
    cpu_seconds: float
    resident_mib: float


def profile(options: argparse.Namespace) -> int:
    if options.report is not None:
        check_plots()
    pids = [] if options.run_dir is None else cluster_pids(options.run_dir)
    metrics_before, used_before = read_metrics(options.url), cpu_seconds(pids)
    finished, summary = measured(options)
    phases, used = differences(metrics_before, read_metrics(options.url)), used_since(used_before, cpu_seconds(pids))
    print("\n".join(table(summary)))
    tokens = max(1, sum(record.output_tokens for record in finished.records))
    if phases:
        print(f"\n{'observed by the server':58} {'count':>8} {'mean':>12}")
    for phase in phases:
        print(f"{phase.name + phase.labels:58} {phase.count:8.0f} {phase.mean:12.6g}")
    if used:
        print(f"\n{'process':34} {'CPU s':>9} {'ms/token':>9} {'MiB':>8}")
    for process in used:
        each = 1e3 * process.cpu_seconds / tokens
        print(f"{process.name:34} {process.cpu_seconds:9.2f} {each:9.3f} {process.resident_mib:8.0f}")
    keep(options, finished, summary, {"phases": phases, "processes": used})
    return 0 if summary.completed else 1


def read_metrics(url: str) -> dict[tuple[str, str], tuple[float, float]]:
    """(name, labels) → (sum, count) of every histogram and summary; nothing if the server shows none."""
    try:
        with urllib.request.urlopen(url.rstrip("/").removesuffix("/v1") + "/metrics", timeout=_TIMEOUT) as answer:
            text = answer.read().decode(errors="replace")
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError, urllib.error.URLError) as error:
        print(f"note: no figures from the server's /metrics: {error}", file=sys.stderr)
        return {}
    found: dict[tuple[str, str], list[float]] = {}
    for family in families:
        for sample in family.samples:
            for place, ending in enumerate(("_sum", "_count")):
                if family.type in ("histogram", "summary") and sample.name.endswith(ending):
                    labels = json.dumps(sample.labels, sort_keys=True) if sample.labels else ""
                    key = (sample.name.removesuffix(ending), labels)
                    found.setdefault(key, [0.0, 0.0])[place] = sample.value
    return {key: (value[0], value[1]) for key, value in found.items()}


def differences(
    before: dict[tuple[str, str], tuple[float, float]], after: dict[tuple[str, str], tuple[float, float]]
) -> list[Observed]:
    found = []
    for (name, labels), (total, count) in sorted(after.items()):
        old_total, old_count = before.get((name, labels), (0.0, 0.0))
        if count > old_count:
            found.append(Observed(name, labels, count - old_count, (total - old_total) / (count - old_count)))
    return found


def cpu_seconds(roots: list[int]) -> dict[int, tuple[str, float, int]]:
    """pid → (name, user and system seconds, start) of the processes and all below them."""
    pids = [pid for root in roots for pid in descendants(root)]
    samples = ((pid, read_sample(pid)) for pid in pids)
    return {pid: (sample.name, sample.seconds, sample.started) for pid, sample in samples if sample is not None}


def used_since(before: dict[int, tuple[str, float, int]], after: dict[int, tuple[str, float, int]]) -> list[Used]:
    """A process that began meanwhile counts whole; one that ended is not seen any more."""
    found = []
    for pid, (name, seconds, started) in after.items():
        old = before.get(pid)
        spent = seconds - old[1] if old is not None and old[2] == started else seconds
        try:
            resident = psutil.Process(pid).memory_info().rss / (1 << 20)
        except psutil.Error:
            continue
        found.append(Used(pid, name, spent, resident))
    return found
