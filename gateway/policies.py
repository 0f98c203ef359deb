"""How one instance is chosen among several that would do.

In: candidates and the work this gateway has outstanding on each. Out: one candidate. Pure. A
policy never looks at anything but its arguments, so that a routing decision can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.instances import Instance


@dataclass(frozen=True, slots=True)
class Load:
    """Work of this gateway on one instance."""

    requests: int = 0
    tokens: int = 0  # prompt tokens on the prefill side, prompt plus longest output on the decode side
    last_chosen: int = 0  # number of the routing decision that last chose it; 0: never


Policy = Callable[[Sequence[Instance], Mapping[str, Load]], Instance]


def least_outstanding(candidates: Sequence[Instance], loads: Mapping[str, Load]) -> Instance:
    """The one with the fewest outstanding tokens, then requests; among equals, the longest not chosen."""
    assert candidates, "a policy chooses among at least one"

    def rank(instance: Instance) -> tuple[int, int, int]:
        load = loads.get(instance.dialed, Load())
        return load.tokens, load.requests, load.last_chosen

    return min(candidates, key=rank)
