"""`python -m sim.run --seeds A:B [--profile NAME] [--jobs N]`: many runs, and what they showed.

Prints events per second, faults by kind, lifecycle cells reached, and each violation with the case that
repeats it. Exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing import Pool

from sim.coverage import Coverage
from sim.draw import PROFILES, draw
from sim.world import Result, simulate

ALL = "all"


def run_seed(job: tuple[int, str]) -> Result:
    """A world is one large cycle that dies as a whole: looking for parts of it meanwhile is wasted."""
    gc.disable()
    result = simulate(draw(*job))
    result.world = None  # it need not cross to the parent process
    gc.enable()
    return result


def profile_of(seed: int, profile: str) -> str:
    """The profile itself, or for "all" the seed's turn among them."""
    names = sorted(PROFILES)
    return names[seed % len(names)] if profile == ALL else profile


def run_all(seeds: Iterable[int], profile: str, jobs: int) -> Iterator[Result]:
    work = [(seed, profile_of(seed, profile)) for seed in seeds]
    if jobs == 1:
        yield from map(run_seed, work)
        return
    with Pool(jobs) as pool:
        yield from pool.imap_unordered(run_seed, work, chunksize=4)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.run", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="first:last (exclusive)")
    parser.add_argument("--profile", default=ALL, choices=[ALL, *sorted(PROFILES)], help="all: each in turn")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cells", action="store_true", help="list every lifecycle cell with its count")
    parser.add_argument("--stop", action="store_true", help="stop at the first violation")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    coverage, outcomes = Coverage(), Counter[str]()
    events = runs = 0
    virtual, bad = 0.0, []
    started = time.perf_counter()
    for result in run_all(seeds, options.profile, options.jobs):
        runs, events, virtual = runs + 1, events + result.events, virtual + result.virtual / 1e6
        coverage.cells += result.coverage.cells
        coverage.faults += result.coverage.faults
        outcomes.update(_kind(outcome) for outcome in result.outcomes.values())
        if result.violation:
            bad.append(result)
            found = profile_of(result.case.seed, options.profile)
            print(f"seed {result.case.seed} ({found}): {result.violation}", flush=True)
            if options.stop:
                break
    took = time.perf_counter() - started
    print(
        f"{runs} runs, {events} events, {virtual:.0f} s of virtual time in {took:.1f} s: {events / took:.0f} events/s"
    )
    print("requests:", ", ".join(f"{name} {count}" for name, count in outcomes.most_common()))
    print("faults:", ", ".join(f"{kind} {count}" for kind, count in sorted(coverage.faults.items())) or "none")
    print(f"lifecycle cells reached: {len(coverage.cells)}")
    if options.cells:
        for (side, state, event), count in sorted(coverage.cells.items()):
            print(f"  {side:8} {state:24} {event:24} {count}")
    print(f"violations: {len(bad)}")
    if bad:
        seed = bad[0].case.seed
        print(f"shrink one with: python -m sim.shrink {seed} --profile {profile_of(seed, options.profile)}")
    return 1 if bad else 0


def _kind(outcome: str) -> str:
    return outcome if outcome in ("ok", "cancelled") else "failed"


if __name__ == "__main__":
    sys.exit(main())
