"""`python -m sim.shrink SEED [--profile NAME] [--bug NAME]`: the smallest case that still fails, as a test.

In: a case that violates an invariant. Out: a smaller one that violates *something of the same kind*:
fewer requests, fewer faults, fewer instances and ranks, plainer requests, no stragglers. Printed as a
test to keep, with the story of the request that the violation names.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from sim.case import CUT, SECOND, Case, Delays, InstancePlan, RequestPlan
from sim.draw import PROFILES, draw
from sim.mutations import MUTATIONS
from sim.world import Result, simulate


def kind_of(violation: str) -> str:
    """A violation without the names and numbers of one run."""
    return re.sub(r"[A-Z]\d+#\d+\.\d+|'[^']*'|[\d.]+|\br\d+(/\d+)?\b|\[.*", "·", violation)[:60]


def shrink(case: Case, budget: int = 1500) -> Result:
    """Runs at most `budget` cases; returns the result of the smallest one that still fails alike."""
    best = simulate(case)
    assert best.violation, "a case that passes cannot be shrunk"
    wanted, left, progress = kind_of(best.violation), budget, True
    while progress and left > 0:
        progress = False
        for smaller in candidates(best.case):
            if left <= 0:
                break
            left -= 1
            result = simulate(smaller)
            if result.violation and kind_of(result.violation) == wanted:
                best, progress = result, True
                break
    return best


def candidates(case: Case) -> Iterator[Case]:
    """Cases a little smaller than this one, the boldest first."""
    for field in ("requests", "faults"):
        items = getattr(case, field)
        size = len(items)
        while size := size // 2:
            for at in range(0, len(items), size):
                yield _replaced(case, **{field: items[:at] + items[at + size :]})
        if len(items) == 1 and field == "faults":
            yield replace(case, faults=())
    for side in ("prefill", "decode"):
        plans = getattr(case, side)
        if len(plans) > 1:
            yield _without_last(case, side)
        for index, plan in enumerate(plans):
            for smaller in _smaller_instances(plan):
                yield _replaced(case, **{side: (*plans[:index], smaller, *plans[index + 1 :])})
    most = max(plan.ranks for plan in (*case.prefill, *case.decode))
    if case.layers > most:
        yield replace(case, layers=most)
    for index, request in enumerate(case.requests):
        for plainer in _plainer_requests(request):
            yield replace(case, requests=(*case.requests[:index], plainer, *case.requests[index + 1 :]))
    if case.capacity is not None:
        yield replace(case, capacity=None)
    if case.parked < 1024:
        yield replace(case, parked=1024)
    if case.delays.straggler:
        yield replace(case, delays=replace(case.delays, straggler=0.0))
    plain = Delays()
    for name in ("ring", "link", "engine", "copy", "loop"):
        if getattr(case.delays, name) != getattr(plain, name):
            yield _replaced(case, delays=_replaced(case.delays, **{name: getattr(plain, name)}))


def _replaced(item: Any, **changes: Any) -> Any:
    """`replace` for fields whose names are only known at run time."""
    return replace(item, **changes)


def _without_last(case: Case, side: str) -> Case:
    plans = getattr(case, side)[:-1]
    letter, gone = side[0].upper(), len(plans)
    faults = [f for f in case.faults if f.instance != f"{letter}{gone}"]
    faults = [f for f in faults if f.kind != CUT or (f.rank if side == "prefill" else f.value) != gone]
    return _replaced(case, **{side: plans, "faults": tuple(faults)})


def _smaller_instances(plan: InstancePlan) -> Iterator[InstancePlan]:
    for ranks in dict.fromkeys((1, plan.ranks // 2, plan.ranks - 1)):
        if 0 < ranks < plan.ranks:
            yield replace(plan, ranks=ranks)
    if len(dict.fromkeys(plan.forward)) > 1:
        yield replace(plan, forward=(min(plan.forward),))
    if plan.async_depth:
        yield replace(plan, async_depth=0)
    if plan.stage_timeout < 60 * SECOND:
        yield replace(plan, stage_timeout=60 * SECOND)


def _plainer_requests(request: RequestPlan) -> Iterator[RequestPlan]:
    if request.cancel:
        yield replace(request, cancel=0)
    if request.timeout < 3600 * SECOND:
        yield replace(request, timeout=3600 * SECOND)
    if request.twice or request.any_epoch:
        yield replace(request, twice=False, any_epoch=False)
    if request.output > 1:
        yield replace(request, output=request.output // 2)
    if request.prompt > 1:
        yield replace(request, prompt=request.prompt // 2)


def as_test(result: Result, name: str, bug: str = "") -> str:
    """Python that repeats the failure, and the story of the request it names."""
    assert result.world is not None
    named = re.search(r"\b(r\d+|probe\d+)(/\d+)?\b", result.violation)
    requests = [named.group(1)] if named else [request.name for request in result.case.requests[:2]]
    story = [line for request in requests for line in result.world.story(request)]
    case = repr(result.case)
    under = f"    with MUTATIONS[{bug!r}].planted():\n        result = simulate(case)\n" if bug else ""
    return "\n".join(
        [
            f"def test_{name}() -> None:",
            f"    # {result.violation}",
            *(f"    #   {line}" for line in story),
            f"    case = {case}",
            under.rstrip("\n") or "    result = simulate(case)",
            "    assert not result.violation",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.shrink", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--profile", default="mixed", choices=sorted(PROFILES))
    parser.add_argument("--bug", default="", choices=["", *MUTATIONS], help="under a planted bug")
    parser.add_argument("--budget", type=int, default=1500, help="how many cases to try")
    options = parser.parse_args(arguments)
    case = draw(options.seed, options.profile)
    with MUTATIONS[options.bug].planted() if options.bug else nullcontext():
        first = simulate(case)
        if not first.violation:
            print(f"seed {options.seed} ({options.profile}) passes")
            return 0
        best = shrink(case, options.budget)
    print(f"# from {len(case.requests)} requests, {len(case.faults)} faults, {first.events} events")
    print(f"# to {len(best.case.requests)} requests, {len(best.case.faults)} faults, {best.events} events")
    print(as_test(best, f"seed_{options.seed}_{options.profile}", options.bug))
    return 1


if __name__ == "__main__":
    sys.exit(main())
