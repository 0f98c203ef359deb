"""The simulator can fail: a few planted bugs, found within a few seeds. All of them: `python -m sim.mutate`."""

from __future__ import annotations

import pytest

from sim.draw import draw
from sim.mutations import MUTATIONS
from sim.shrink import as_test, shrink
from sim.world import simulate

pytestmark = pytest.mark.sim


def first_failing(bug: str, seeds: int) -> int | None:
    with MUTATIONS[bug].planted():
        for seed in range(seeds):
            if simulate(draw(seed, MUTATIONS[bug].profile)).violation:
                return seed
    return None


FOUND_SOON = (
    *("repoll", "union", "free_before_fence", "early_decode", "lost_bells", "verdict_unchecked"),
    *("maintain_in_launch", "ballot_with_verdict", "death_is_an_edge", "no_tombstone", "short_tombstone"),
    *("no_stop_tombstone", "stop_only_answered", "no_close_tombstone", "tail_not_lived"),
    *("damage_ignored", "lease_not_awaited", "token_unchecked", "skip_shared"),
)


@pytest.mark.parametrize("bug", FOUND_SOON)
def test_a_planted_bug_is_found(bug: str) -> None:
    assert first_failing(bug, 60) is not None


def test_nothing_of_a_planted_bug_stays() -> None:
    seed = first_failing("verdict_unchecked", 60)
    assert seed is not None
    assert not simulate(draw(seed, MUTATIONS["verdict_unchecked"].profile)).violation


def test_a_failing_seed_is_shrunk_to_a_test() -> None:
    bug = "verdict_unchecked"
    seed = first_failing(bug, 60)
    assert seed is not None
    with MUTATIONS[bug].planted():
        case = draw(seed, MUTATIONS[bug].profile)
        small = shrink(case, budget=150)
        assert simulate(small.case).violation == small.violation
    assert len(small.case.requests) < len(case.requests)
    text = as_test(small, "found", bug)
    compile(text, "found", "exec")
    assert "seq " in text and repr(small.case) in text
