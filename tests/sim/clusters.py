"""Small cases for the scenario tests, and a few ways to look into a run while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sim.case import MS, Case, Delays, Fault, InstancePlan, RequestPlan
from sim.rank import RankProcess
from sim.world import Result, World

STEADY = Delays(straggler=0.0)


def case(
    *requests: RequestPlan,
    p: int = 2,
    d: int = 2,
    faults: tuple[Fault, ...] = (),
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **over: Any,
) -> Case:
    """One prefill instance of `p` ranks and one decode instance of `d` ranks."""
    base = Case(
        seed=over.pop("seed", 1),
        prefill=(InstancePlan(ranks=p, **({"pages": 16} | (prefill or {}))),),
        decode=(InstancePlan(ranks=d, **({"pages": 16} | (decode or {}))),),
        requests=requests,
        faults=faults,
        layers=max(p, d, 4),
        delays=over.pop("delays", STEADY),
    )
    return replace(base, **over)


def request(name: str = "r0", at: int = 0, prompt: int = 12, output: int = 6, **over: Any) -> RequestPlan:
    return RequestPlan(name, at, prompt, output, **({"ignore_eos": True} | over))


def passes(world: World | Case) -> Result:
    """Runs to the end: every request ended, tokens are the reference's, nothing is left on any rank."""
    result = (world if isinstance(world, World) else World(world)).run()
    assert not result.violation, result.violation
    return result


def watch(world: World, instance: str, look: Callable[[RankProcess], None]) -> None:
    """Calls `look` with each rank of the instance after each entry that it applied."""
    incarnation = world.instances[instance]
    assert incarnation is not None
    incarnation.watchers.append(look)


def ms(virtual: int) -> float:
    return virtual / MS
