"""`paceline bench profile`: where the time of a load goes.

In: a server, the options of `bench serve`, and, for a cluster on this machine, its run directory. Out, besides what
`serve` tells: per Prometheus histogram of the server the mean of what was observed during the load; of a cluster here,
what each process used of the processors, and per rank its bubbles and what a microbatch cost its control loop. Samples
are differences between a reading before and one after. With `--stacks` and `--allocations` the load runs once more for
each, under py-spy and under memray, so that what those cost is in no other figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench import allocations, rank_figures, stacks
from bench.allocations import Allocated, Trackers
from bench.rank_figures import ProcessFigures, RankFigures, RankWatch
from bench.run import Run
from bench.serve import check_plots, keep, measured
from bench.show import table
from bench.stacks import Spies, Stacks
from bench.summary import Summary
from bench.timelines import ClusterError
from security.secrets import SecretsError, load_if

_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Observed:
    """A histogram or summary of the server, over the load."""

    name: str
    labels: str
    count: float
    mean: float


@dataclass(frozen=True, slots=True)
class Profile:
    run: Run
    summary: Summary
    phases: list[Observed]
    ranks: list[RankFigures] = field(default_factory=list)
    processes: list[ProcessFigures] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return tokens_of(self.run)


def profile(options: argparse.Namespace) -> int:
    if options.report is not None or options.plot is not None:
        check_plots()
    if options.run_dir is None and (options.stacks or options.allocations or options.loads):
        raise SystemExit(
            "paceline bench: --stacks, --allocations and --loads need the --run-dir of a `paceline up` on this machine"
        )
    if options.plot is not None and not options.loads:
        raise SystemExit("paceline bench: --plot needs --loads")
    try:
        if options.loads:
            from bench.against_load import sweep

            return sweep(options)
        return _once(options)
    except (ClusterError, SecretsError) as error:
        raise SystemExit(f"paceline bench: {error}") from error


def _once(options: argparse.Namespace) -> int:
    seen = observe(options)
    print("\n".join([*table(seen.summary), *rows(seen)]), flush=True)
    further: dict[str, Any] = {"phases": seen.phases, "ranks": seen.ranks, "processes": seen.processes}
    if options.stacks:
        sampled = _under_spies(options)
        print("\n".join(["", *stacks.rows(sampled)]), flush=True)
        further["stacks"] = sampled
    if options.allocations:
        tracked, ticks, tokens = _under_trackers(options)
        print("\n".join(["", *allocations.rows(tracked, ticks, tokens)]))
        further["allocations"] = {"tokens": tokens, "ticks": ticks, "processes": tracked}
    keep(options, seen.run, seen.summary, further)
    return 0 if seen.summary.completed else 1


def observe(options: argparse.Namespace) -> Profile:
    """One load, with readings before (but after its warm-up) and after."""
    watch = None if options.run_dir is None else RankWatch(options.run_dir, load_if(options.secrets))
    before: dict[tuple[str, str], tuple[float, float]] = {}

    def begin() -> None:
        before.update(read_metrics(options.url))
        if watch is not None:
            watch.begin()

    finished, summary = measured(options, begin)
    ranks, processes = watch.ended() if watch is not None else ([], [])
    return Profile(finished, summary, differences(before, read_metrics(options.url)), ranks, processes)


def _under_spies(options: argparse.Namespace) -> list[Stacks]:
    print("note: the load once more, under py-spy", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        spies, watch = Spies(Path(folder)), RankWatch(options.run_dir, load_if(options.secrets))
        try:
            measured(options, lambda: spies.start(watch.members))
        finally:
            found = spies.collect()
        return found


def _under_trackers(options: argparse.Namespace) -> tuple[list[Allocated], dict[str, int], int]:
    """Also the microbatches, by rank, and the output tokens that were computed meanwhile."""
    print("note: the load once more, under memray", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        trackers, watch = Trackers(Path(folder)), RankWatch(options.run_dir, load_if(options.secrets))

        def begin() -> None:
            watch.begin()
            trackers.start(watch.members)

        finished, _ = measured(options, begin)
        allocated = trackers.collect()  # first: to read the ranks allocates too
        ranks, _ = watch.ended()
        return allocated, {rank.name: rank.ticks for rank in ranks}, tokens_of(finished)


def tokens_of(finished: Run) -> int:
    return max(1, sum(record.output_tokens for record in finished.records))


def rows(seen: Profile) -> list[str]:
    lines = []
    if seen.phases:
        lines += ["", f"{'observed by the server':58} {'count':>8} {'mean':>12}"]
    lines += [f"{phase.name + phase.labels:58} {phase.count:8.0f} {phase.mean:12.6g}" for phase in seen.phases]
    if seen.processes:
        lines += ["", f"{'process':20} {'CPU s':>9} {'ms/token':>9} {'control s':>10} {'starved s':>10} {'MiB':>8}"]
    for one in seen.processes:
        each = 1e3 * one.cpu_seconds / seen.tokens
        lines.append(
            f"{one.name:20} {one.cpu_seconds:9.2f} {each:9.3f} {one.control_seconds:10.2f}"
            f" {one.starved_seconds:10.2f} {one.resident_mib:8.0f}"
        )
    return [*lines, *([""] if seen.ranks else []), *rank_figures.rows(seen.ranks)]


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
