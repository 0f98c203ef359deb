"""The core under every schedule of small bounds (I1–I4, I6), and the proof that the check can fail."""

from __future__ import annotations

import pytest

from sim.exhaustive import DEFAULT, Counterexample, Search, sample, search
from sim.exhaustive_bugs import BUGS, planted
from sim.exhaustive_state import fingerprint, freeze, thaw
from sim.exhaustive_world import Bounds, World

pytestmark = pytest.mark.sim
AT_ONCE: tuple[str, ...] = ()


def name(bounds: Bounds) -> str:
    return f"{bounds.name}-{bounds.ranks}".replace(" ", "_")


def check(bounds: Bounds) -> int:
    try:
        return search(bounds).schedules
    except Counterexample as found:
        pytest.fail(found.story())


@pytest.mark.parametrize("bounds", DEFAULT, ids=name)
def test_no_schedule_breaks_an_invariant(bounds: Bounds) -> None:
    assert check(bounds) > 10_000


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_told(bug: str) -> None:
    with planted(bug), pytest.raises(Counterexample) as found:
        search(BUGS[bug].bounds)
    assert BUGS[bug].shows in found.value.why
    with planted(bug):
        story = found.value.story()
    assert found.value.why in story and "decides" in story and "all votes on" in story


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds("one prefill rank", True, 1, ((3, 2),), AT_ONCE),
        Bounds("one decode rank", False, 1, ((3, 3),), AT_ONCE),
        Bounds("decode, no failures", False, 2, ((3, 2),), AT_ONCE, bad=()),
    ],
    ids=name,
)
def test_merging_states_counts_each_schedule_once(bounds: Bounds) -> None:
    assert Search(bounds, merge=False).run().schedules == search(bounds).schedules


@pytest.mark.parametrize("bounds", DEFAULT, ids=name)
def test_followers_may_lag(bounds: Bounds) -> None:
    assert sample(bounds, range(25)) > 0


def test_a_frozen_world_has_the_same_future() -> None:
    world = World(DEFAULT[0])
    world.act(("entry",))
    copy = thaw(freeze(world))
    for action in (
        ("observe", 1, "r0/0", "bootstrap", True),
        ("report", 1),
        ("observe", 0, "r0/0", "bootstrap", False),
    ):
        assert fingerprint(copy) == fingerprint(world)
        assert copy.act(action) and world.act(action)
    assert fingerprint(copy) == fingerprint(world) != fingerprint(World(DEFAULT[0]))
