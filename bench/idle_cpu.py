"""Measures what an idle cluster costs: CPU time of all its processes and threads.

In: a running cluster (its run directory, or process ids), or `--start` to run one here. Out: percent of
one core per process and in total; exit code 1 if the total is above the limit. Read from /proc: user and
system time of every thread, since a process's own figures include them all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.local_cluster import started_cluster

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    seconds: float  # user + system, all threads
    started: int  # tells a reused pid


@dataclass(frozen=True, slots=True)
class Usage:
    pid: int
    name: str
    percent: float


def read_sample(pid: int, proc: Path = Path("/proc")) -> Sample | None:
    """None: the process is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text()
        command = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    # The name in parentheses may hold anything; the fields begin after the last one.
    fields = text.rpartition(")")[2].split()
    if fields[0] == "Z":
        return None
    return Sample(short_name(command), (int(fields[11]) + int(fields[12])) / TICKS, int(fields[19]))


def short_name(command: list[str]) -> str:
    """What the process runs: the module after -m, with the rank module where a launcher has one."""
    if "-m" in command[:4]:
        rest = command[command.index("-m") + 1 :]
        modules = [word for word in rest[:3] if "." in word and not word.startswith(("-", "/"))]
        return modules[-1] if modules else rest[0]
    return " ".join(Path(word).name for word in command[:2] if word)


def descendants(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """`pid` and all below it."""
    children: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += sorted(children.get(known, ()))
    return found


def measure(roots: list[int], seconds: float) -> list[Usage]:
    """Raises `SystemExit` if a process ends or starts meanwhile: then the cluster was not idle."""
    pids = [pid for root in roots for pid in descendants(root)]
    before, began = {pid: read_sample(pid) for pid in pids}, time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    usages = []
    for pid, first in before.items():
        last = read_sample(pid)
        if first is None or last is None or first.started != last.started:
            raise SystemExit(f"idle_cpu: process {pid} ended during the measurement")
        usages.append(Usage(pid, first.name, 100 * (last.seconds - first.seconds) / took))
    if [pid for root in roots for pid in descendants(root)] != pids:
        raise SystemExit("idle_cpu: processes were started during the measurement")
    return usages


def cluster_pids(run_dir: Path) -> list[int]:
    """The daemons and the gateway of a local cluster; their ranks are below them."""
    try:
        parts = json.loads((run_dir / "cluster.json").read_text())["parts"]
    except FileNotFoundError:
        raise SystemExit(f"idle_cpu: no cluster runs in {run_dir}; give --run-dir, --pid or --start") from None
    return [part["pid"] for part in parts]


def report(usages: list[Usage], limit: float) -> int:
    for usage in usages:
        print(f"{usage.percent:6.2f} %  {usage.name}  (pid {usage.pid})")
    total = sum(usage.percent for usage in usages)
    print(f"{total:6.2f} %  of one core in total; the limit is {limit:g} %")
    return 1 if total > limit else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.idle_cpu", description="Measure the CPU time of an idle cluster."
    )
    parser.add_argument("--start", action="store_true", help="start a cluster for the measurement")
    parser.add_argument("--run-dir", type=Path, default=Path(os.environ.get("PACELINE_RUN_DIR", ".run")))
    parser.add_argument("--pid", type=int, nargs="+", help="measure these processes and what is below them")
    parser.add_argument("--seconds", type=float, default=20.0, help="default: 20")
    parser.add_argument("--limit", type=float, default=3.0, help="percent of one core, in total (default: 3)")
    options, up_options = parser.parse_known_args()
    if up_options and not options.start:
        parser.error(f"only --start takes options of `paceline up`: {' '.join(up_options)}")
    if options.start:
        with started_cluster(up_options) as cluster:
            usages = measure(cluster_pids(cluster.run_dir), options.seconds)
    else:
        usages = measure(options.pid or cluster_pids(options.run_dir), options.seconds)
    return report(usages, options.limit)


if __name__ == "__main__":
    sys.exit(main())
