"""`python -m sim.mutate [NAME ...] [--seeds N] [--jobs N]`: does the simulator notice each planted bug?

Prints a table: bug → seeds needed and what was seen. Exit code 1 if one was not found.
"""

from __future__ import annotations

import argparse
import sys
import time
from multiprocessing import Pool

from sim.draw import draw
from sim.mutations import MUTATIONS
from sim.world import simulate


def hunt(job: tuple[str, int]) -> tuple[str, int, str, float]:
    """Seeds until the bug shows (0: it did not), what showed, seconds."""
    name, seeds = job
    mutation, started = MUTATIONS[name], time.perf_counter()
    with mutation.planted():
        for seed in range(seeds):
            result = simulate(draw(seed, mutation.profile))
            if result.violation:
                return name, seed + 1, result.violation, time.perf_counter() - started
    return name, 0, "", time.perf_counter() - started


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.mutate", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MUTATIONS))
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    names = options.names or list(MUTATIONS)
    missed = 0
    print(f"{'bug':28} {'seeds':>5}  {'profile':9} {'time':>6}  seen")
    with Pool(options.jobs) as pool:
        for name, seeds, seen, took in pool.imap(hunt, [(name, options.seeds) for name in names]):
            missed += not seeds
            shown = seen[:110] or "NOT FOUND"
            print(f"{name:28} {seeds or '-':>5}  {MUTATIONS[name].profile:9} {took:5.1f}s  {shown}", flush=True)
    print(f"{len(names)} bugs, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
