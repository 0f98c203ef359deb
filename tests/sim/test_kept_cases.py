"""Shrunk cases of bugs that were found, with their stories. Unlike a seed, a case survives changes of `sim.draw`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.case import CUT, MS, SECOND, Delays, Fault, InstancePlan
from sim.mutations import MUTATIONS
from sim.world import simulate
from tests.sim.clusters import case, request

pytestmark = pytest.mark.sim


def overtaken(seed: int) -> str:
    """r3 is cancelled in the entry that opens r6, which fails at once on rank 1: two reports from one entry."""
    slow = Delays(ring=(500, 5000), link=(1, 20), loop=(0, 1000), straggler=0.05)
    requests = [
        request("r3", at=2079, prompt=1, output=1, cancel=2183, ignore_eos=False),
        request("r6", at=4532, prompt=1, output=1, ignore_eos=False),
    ]
    plan = case(*requests, seed=seed, delays=slow, prefill={"chunk": 4}, page_size=8)
    return simulate(plan).violation


def test_a_numbered_report_is_not_overtaken() -> None:
    #   P0#1 seq 2: open r3
    #   P0#1 seq 3: open r6, end r3 (abort), r3 bootstrapping → done
    # Rank 1 numbered the deletion of r3 first; performing `OpenRoom(r6)` made it report r6, and that went out first.
    with MUTATIONS["reports_after_effects"].planted():
        assert any("UpdateLost" in overtaken(seed) for seed in range(60))
    assert not any(overtaken(seed) for seed in range(60))


def test_silence_is_not_held_against_the_next_request() -> None:
    #   P0#1 seq 43: open probe1
    #   P0#1 seq 44: end probe1, error: bootstrap failed: rank 0: no word from D1
    # Rank 0 had found D1 silent while their link was cut for 15 s; the link had healed long before.
    requests = [request(f"r{i}", at=i * 10 * MS, prompt=5, output=2) for i in range(6)]
    cut = Fault(CUT, 15 * MS, rank=0, value=1, length=15 * SECOND)
    plan = case(*requests, faults=(cut,))
    decode = (InstancePlan(ranks=1, pages=6), InstancePlan(ranks=3, pages=4))
    for seed in range(10):
        assert not simulate(replace(plan, seed=seed, decode=decode)).violation
