"""Many seeds of every profile. SEEDS=2000 makes the run longer; FIRST_SEED moves it to new ground."""

from __future__ import annotations

import os

import pytest

from sim.draw import PROFILES, draw
from sim.world import simulate

pytestmark = pytest.mark.sim
SEEDS = int(os.environ.get("SEEDS", "50"))
FIRST = int(os.environ.get("FIRST_SEED", "0"))


@pytest.mark.timeout(60 + SEEDS * 2)
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_seeds_keep_every_invariant(profile: str) -> None:
    for seed in range(FIRST, FIRST + SEEDS):
        violation = simulate(draw(seed, profile)).violation
        assert not violation, f"python -m sim.shrink {seed} --profile {profile}  # {violation}"
