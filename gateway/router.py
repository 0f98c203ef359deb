"""Chooses the pair of each request and keeps the book of outstanding work.

In: the fleet as it is now, and what a request will cost. Out: a `Pair`, or the reason why there
is none. Pure. Every `choose` that returned a pair is followed by exactly one `ended` per side;
when all have ended every load is zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.instances import Fleet, Instance, Pair, Side
from gateway.policies import Load, Policy, least_outstanding


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request may occupy, in tokens."""

    prompt: int
    output: int  # the most it may generate

    def on(self, side: Side) -> int:
        # Prefill computes the prompt; decode holds pages for prompt and output.
        return self.prompt if side is Side.PREFILL else self.prompt + self.output


class Router:
    def __init__(self, policy: Policy = least_outstanding) -> None:
        self._policy = policy
        self._loads: dict[str, Load] = {}
        self._decisions = 0

    def choose(self, fleet: Fleet, cost: Cost) -> Pair | str:
        """A compatible pair, its loads already charged; or, for people, why there is none."""
        reason = fleet.why_no_pair()
        if reason is not None:
            return reason
        prefill = self._policy(fleet.pairable_prefills(), self._loads)
        decode = self._policy(fleet.decodes_for(prefill), self._loads)
        self._decisions += 1
        self._charge(prefill, cost)
        self._charge(decode, cost)
        return Pair(prefill, decode)

    def ended(self, instance: Instance, cost: Cost) -> None:
        """The instance is done with a request that `choose` gave it."""
        load = self._loads[instance.dialed]
        tokens, requests = load.tokens - cost.on(instance.side), load.requests - 1
        assert tokens >= 0 and requests >= 0, f"more work ended on {instance.dialed} than was given: {load}"
        self._loads[instance.dialed] = replace(load, tokens=tokens, requests=requests)

    def load_of(self, instance: Instance) -> Load:
        return self._loads.get(instance.dialed, Load())

    def _charge(self, instance: Instance, cost: Cost) -> None:
        load = self.load_of(instance)
        self._loads[instance.dialed] = Load(
            requests=load.requests + 1,
            tokens=load.tokens + cost.on(instance.side),
            last_chosen=self._decisions,
        )
