"""Admission under long forwards, in virtual time: Paceline's log beside two published rules, with a plot.

`python bench/admission.py [--ranks 8] [--requests 200] [--plot docs/admission.svg]`. The numbers come from
`python -m sim.admission`, which runs the real core; this prints medians and percentiles and draws them.
Exit code 1 if the log's p99 is 5 ms or more.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

LIMIT = 0.005  # seconds
NAMES = {"log": "Paceline: ordered log", "ring": "vote, one hop per forward", "store": "store, then chain at slot pace"}
COLOURS = {"log": "#1a7f37", "ring": "#cf222e", "store": "#9a6700"}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def plot(waits: dict[str, list[float]], ranks: int) -> str:
    """Cumulative share of rooms admitted against time, on a logarithmic axis, as SVG."""
    low, high, width, height = 1e-4, 100.0, 640, 320

    def x(seconds: float) -> float:
        return 70 + width * math.log10(max(seconds, low) / low) / math.log10(high / low)

    def y(share: float) -> float:
        return 40 + height * (1 - share)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 440" font-family="sans-serif" font-size="13">',
        '<rect width="760" height="440" fill="white"/>',
        f'<text x="70" y="24" font-size="15">Ready → admitted on {ranks} ranks; 1 s forwards, virtual time</text>',
    ]
    for exponent in range(-4, 3):
        at = x(10.0**exponent)
        label = f"{10.0**exponent:g} s" if exponent >= 0 else f"{10.0 ** (exponent + 3):g} ms"
        parts.append(f'<path d="M{at:.1f} 40V{40 + height}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{at:.1f}" y="{58 + height}" text-anchor="middle">{label}</text>')
    for share in (0, 0.5, 1):
        parts.append(f'<path d="M70 {y(share):.1f}h{width}" stroke="#d0d7de"/>')
        parts.append(f'<text x="62" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for row, (name, values) in enumerate(waits.items()):
        ordered = sorted(values)
        points = " ".join(f"{x(v):.1f},{y((i + 1) / len(ordered)):.1f}" for i, v in enumerate(ordered))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(f'<text x="{80 + row * 230}" y="{92 + height}" fill="{COLOURS[name]}">{NAMES[name]}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="write an SVG here")
    options = parser.parse_args()
    command = [sys.executable, "-m", "sim.admission", *map(str, (options.ranks, options.requests, options.seed))]
    waits: dict[str, list[float]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    print(
        f"{options.ranks} ranks, forwards of 1 s, {len(waits['log'])} rooms; seconds from ready to admitted everywhere"
    )
    print(f"{'rule':34} {'p50':>10} {'p99':>10} {'worst':>10}")
    for name, values in waits.items():
        figures = (statistics.median(values), percentile(values, 0.99), max(values))
        print(f"{NAMES[name]:34} " + " ".join(f"{figure:10.6f}" for figure in figures))
    if options.plot:
        options.plot.write_text(plot(waits, options.ranks))
        print(f"plot: {options.plot}")
    return 0 if percentile(waits["log"], 0.99) < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
