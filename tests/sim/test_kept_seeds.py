"""Seeds that once found something are run for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.draw import draw
from sim.world import simulate

pytestmark = pytest.mark.sim
LINES = Path(__file__).with_name("kept_seeds.txt").read_text().splitlines()
KEPT = [line.split(maxsplit=2) for line in LINES if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize(("profile", "seed", "why"), KEPT, ids=[f"{profile}-{seed}" for profile, seed, _ in KEPT])
def test_kept_seed(profile: str, seed: str, why: str) -> None:
    result = simulate(draw(int(seed), profile))
    assert not result.violation, f"{why}: {result.violation}"
