"""The measurement of the control plane drives the real core: what it says it holds, it holds."""

from __future__ import annotations

import pytest

from sim.control_cost import Ring, measure


@pytest.mark.parametrize("ranks", [1, 3])
def test_as_many_run_and_wait_as_asked_for_while_requests_come_and_go(ranks: int) -> None:
    ring = Ring(ranks, running=12, waiting=50)
    ring.settle()
    begun = ring.cores[0].replica.opened
    for _ in range(300 * (ranks + 1)):  # a token of everybody takes as many ticks as there are slots
        ring.tick()
    replica = ring.cores[-1].replica
    assert replica.opened > begun + 12
    assert abs(ring.at_work - 12) <= 1
    assert abs(len(ring.cores[0].replica.requests) - 62) <= 1
    assert replica.counters["retracted"] == 0


def test_every_rank_has_its_cost() -> None:
    cost = measure(3, 8, 20, 30)
    assert len(cost.median_us) == 3
    assert min(cost.median_us) > 0
    # Eight requests over three ranks' slots and one more.
    assert 2 <= cost.rows <= 3
