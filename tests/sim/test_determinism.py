"""A seed is a run: the same trace every time, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.draw import PROFILES, draw
from sim.world import simulate

pytestmark = pytest.mark.sim
SEEDS = (("mixed", 3), ("mixed", 9), ("aborts", 4), ("deaths", 5), ("transfer", 6), ("grow", 7), ("zero", 2))
# One in twenty of the seeds that `test_runs` runs by default.
SAMPLE = tuple((profile, seed) for profile in sorted(PROFILES) for seed in range(50))[::20]
PRINT = """
from sim.draw import draw
from sim.world import simulate
print(*(simulate(draw(seed, profile)).trace for profile, seed in {seeds!r}))
"""


def traces(seeds: tuple[tuple[str, int], ...] = SEEDS) -> list[str]:
    return [simulate(draw(seed, profile)).trace for profile, seed in seeds]


def traces_elsewhere(hash_seed: str, seeds: tuple[tuple[str, int], ...] = SEEDS) -> list[str]:
    """The same in a process of its own, whose strings have other hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PRINT.format(seeds=seeds)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_same_seed_gives_the_same_trace() -> None:
    assert traces() == traces()


def test_other_seeds_give_other_traces() -> None:
    assert len(dict.fromkeys(traces())) == len(SEEDS)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_the_hash_seed_of_the_process_does_not_matter(hash_seed: str) -> None:
    assert traces_elsewhere(hash_seed) == traces()


def test_one_in_twenty_seeds_is_run_again_under_another_hash_seed() -> None:
    assert len(SAMPLE) >= 25
    other = "1" if os.environ.get("PYTHONHASHSEED") == "4242" else "4242"
    assert traces_elsewhere(other, SAMPLE) == traces(SAMPLE)
