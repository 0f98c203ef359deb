"""What control costs each rank per tick, by running and by waiting requests, with a plot.

    python -m bench.control_plane [--plot docs/control-plane.svg]

The numbers come from `python -m sim.control_cost`, which runs the real core of a decode instance. Out: a table, and
whether the targets hold: at most 200 µs of CPU (median) per tick and rank at 64 running and 1,000 waiting requests, a
tick per request of the batch that costs no more at 256 running than at 16, and no more with 10,000 waiting than with
1,000, within half of it. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUNNING, WAITING = (16, 64, 256), (0, 100, 1000, 3000, 10000)
LIMIT_US, SLACK = 200.0, 1.5
Cost = dict[str, Any]  # as `sim.control_cost` tells it


def measured(ranks: int, ticks: int) -> list[Cost]:
    command = [sys.executable, "-m", "sim.control_cost", "--json", "--ranks", str(ranks), "--ticks", str(ticks)]
    command += ["--running", *map(str, RUNNING), "--waiting", *map(str, WAITING)]
    costs: list[Cost] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return costs


def median_of(costs: Sequence[Cost], running: int, place: int) -> float:
    """Of the rank with the most to do, at the place-th number of waiting requests."""
    found: float = max([cost for cost in costs if cost["running"] == running][place]["median_us"])
    return found


def misses(costs: Sequence[Cost]) -> list[str]:
    thousand, most = WAITING.index(1000), len(WAITING) - 1
    found = []
    if (at := median_of(costs, 64, thousand)) > LIMIT_US:
        found.append(f"{at:.0f} µs at 64 running and 1000 waiting; the limit is {LIMIT_US:g}")
    small, large = (
        median_of(costs, running, thousand) / next(c["rows"] for c in costs if c["running"] == running)
        for running in (RUNNING[0], RUNNING[-1])
    )
    if large > small:
        found.append(f"{large:.1f} µs per request of a batch at {RUNNING[-1]} running, {small:.1f} at {RUNNING[0]}")
    for running in RUNNING:
        few, many = median_of(costs, running, thousand), median_of(costs, running, most)
        if many > SLACK * few:
            found.append(f"{many:.0f} µs at {running} running and {WAITING[most]} waiting, {few:.0f} at 1000")
    return found


def plot(costs: Sequence[Cost], path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "control", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.6, 4), layout="constrained")
        axes = figure.subplots()
        for running in RUNNING:
            values = [max(cost["median_us"]) for cost in costs if cost["running"] == running]
            axes.plot(WAITING, values, "o-", label=f"{running} running")
        axes.axhline(LIMIT_US, color="#cf222e", linestyle="--", linewidth=1)
        axes.set(xlabel="waiting requests", ylabel="µs per tick, median", ylim=(0, None))
        axes.set_xscale("symlog", linthresh=100)
        axes.set_title("Control of a tick, CPU of the busiest rank")
        axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.control_plane", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ticks", type=int, default=400)
    parser.add_argument("--plot", type=Path, help="write an SVG here (needs matplotlib)")
    options = parser.parse_args()
    costs = measured(options.ranks, options.ticks)
    print(f"{'running':>8} {'waiting':>8} {'rows/tick':>10} {'µs/tick':>9} {'mean':>9} {'µs/row':>8}")
    for cost, waiting in zip(costs, WAITING * len(RUNNING), strict=True):
        middle, mean = max(cost["median_us"]), max(cost["mean_us"])
        each = middle / cost["rows"]
        print(f"{cost['running']:8} {waiting:8} {cost['rows']:10.1f} {middle:9.1f} {mean:9.1f} {each:8.1f}")
    if options.plot is not None:
        plot(costs, options.plot)
    found = misses(costs)
    for miss in found:
        print(f"missed: {miss}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
