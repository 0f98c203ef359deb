"""Chooses the pair of each request and keeps the book of outstanding work.

In: the fleet as it is now, what a request will cost, which instances its earlier attempts suspect, and
how hand-overs ended. Out: a `Pair`, or the reason why there is none. Pure. Every `started` is followed
by exactly one `ended` per side; when all have ended every load is zero. Suspicion and troubled pairs
make other pairs preferred, but never leave a request without any.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gateway.breaker import Breaker
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
        self._breaker = Breaker()
        self._loads: dict[str, Load] = {}
        self._decisions = 0

    def choose(
        self, fleet: Fleet, now: float, suspects: Collection[Instance] = (), trusted: bool = False
    ) -> Pair | str:
        """A compatible pair with as few suspects as can be, or with none if it must be `trusted`.

        Or, for people, why there is none.
        """
        reason = fleet.why_no_pair()
        if reason is not None:
            return reason
        pairs = [Pair(prefill, decode) for prefill in fleet.prefills for decode in fleet.decodes_for(prefill)]
        due = {pair: self._breaker.due(pair) for pair in pairs}
        usable = [pair for pair in pairs if due[pair] <= now] or [min(pairs, key=due.__getitem__)]
        doubts = {pair: (pair.prefill in suspects) + (pair.decode in suspects) for pair in usable}
        fewest = min(doubts.values())
        if trusted and fewest:
            return "no other pair is free of the instances that failed"
        best = [pair for pair in usable if doubts[pair] == fewest]
        prefill = self._policy(list(dict.fromkeys(pair.prefill for pair in best)), self._loads)
        decode = self._policy([pair.decode for pair in best if pair.prefill == prefill], self._loads)
        return Pair(prefill, decode)

    def started(self, pair: Pair, cost: Cost, now: float) -> None:
        """The pair that `choose` gave is used."""
        self._decisions += 1
        self._charge(pair.prefill, cost)
        self._charge(pair.decode, cost)
        self._breaker.chosen(pair, now)

    def handed_over(self, pair: Pair, worked: bool, now: float) -> None:
        """A hand-over between the two ended."""
        if worked:
            self._breaker.succeeded(pair)
        else:
            self._breaker.failed(pair, now)

    def ended(self, instance: Instance, cost: Cost) -> None:
        """The instance is done with a request that was started on it."""
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
