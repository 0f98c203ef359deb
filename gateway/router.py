"""Chooses the pair of each request.

In: the fleet as it is now, what is to be placed, which instances its earlier attempts suspect, how hand-overs
ended, and what instances say of their load. Out: a `Pair`, or why there is none. Pure. Suspicion and troubled
pairs make other pairs preferred, but never leave a request without any; a pair that cannot hold the request,
or that would begin to answer too late for it, is never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gateway.breaker import Breaker
from gateway.instances import Fleet, Instance, Pair, Side
from gateway.policies import LeastWork, Load, Placing, Policy
from gateway.workbook import Entry, Report, Workbook


@dataclass(frozen=True, slots=True)
class NoPair:
    """Why no pair was chosen, for people."""

    reason: str
    late_s: float = 0.0  # some pair would do, but for its first token coming so much too late


class Router:
    def __init__(self, policy: Policy | None = None) -> None:
        self._policy: Policy = policy or LeastWork()
        self._breaker = Breaker()
        self._book = Workbook()
        self._decisions = 0

    def choose(
        self,
        fleet: Fleet,
        placing: Placing,
        now: float,
        suspects: Collection[Instance] = (),
        trusted: bool = False,
        patience_s: float = math.inf,
    ) -> Pair | NoPair:
        """A compatible pair with as few suspects as can be, or with none if it must be `trusted`.

        `patience_s`: how long the request can wait for its first token.
        """
        reason = fleet.why_no_pair()
        if reason is not None:
            return NoPair(reason)
        tokens = placing.cost.prompt + placing.cost.output
        pairs = fleet.pairs_for(tokens)
        if not pairs:
            return NoPair(
                f"of the pairs that serve none takes {tokens} tokens; the largest takes {fleet.context_limit}"
            )
        due = [self._breaker.due(pair) for pair in pairs]
        usable = [pair for pair, at in zip(pairs, due, strict=True) if at <= now] or [pairs[due.index(min(due))]]
        doubts = [(pair.prefill in suspects) + (pair.decode in suspects) if suspects else 0 for pair in usable]
        fewest = min(doubts)
        if trusted and fewest:
            return NoPair("no other pair is free of the instances that failed")
        best = [pair for pair, doubt in zip(usable, doubts, strict=True) if doubt == fewest]
        prefills = list({pair.prefill.dialed: pair.prefill for pair in best}.values())
        waits = [self.first_token_s(prefill, placing) for prefill in prefills]
        in_time = [prefill for prefill, wait in zip(prefills, waits, strict=True) if wait <= patience_s]
        if not in_time:
            return NoPair(
                f"the first token is expected in {min(waits):.1f} s, but the request has only {patience_s:.1f} s",
                min(waits) - patience_s,
            )
        prefill = self._chosen(in_time, placing)
        decode = self._chosen([pair.decode for pair in best if pair.prefill is prefill], placing)
        return Pair(prefill, decode)

    def first_token_s(self, prefill: Instance, placing: Placing) -> float:
        """Seconds until prefill will have computed what is queued there and this prompt; 0: its speed is not known."""
        load = self._book.load_of(prefill)
        return (load.tokens + placing.cost.prompt) / load.rate if load.rate else 0.0

    def started(self, pair: Pair, placing: Placing, now: float) -> dict[Side, Entry]:
        """The pair that `choose` gave is used. What is given is handed back, by side, when that has ended."""
        self._decisions += 1
        self._breaker.chosen(pair, now)
        return {side: self._book.started(pair.of(side), placing.cost, self._decisions) for side in Side}

    def ended(self, entry: Entry) -> None:
        """The instance is done with a request that was started on it."""
        self._book.ended(entry)

    def handed_over(self, pair: Pair, worked: bool, now: float) -> None:
        """A hand-over between the two ended."""
        if worked:
            self._breaker.succeeded(pair)
        else:
            self._breaker.failed(pair, now)

    def reported(self, instance: Instance, report: Report) -> None:
        """The instance has told its load."""
        self._book.reported(instance, report)

    def keep(self, known: Collection[str]) -> None:
        """These are all addresses of instances there are; the rest may be forgotten."""
        self._book.keep(known)
        self._breaker.keep(known)

    def load_of(self, instance: Instance) -> Load:
        return self._book.load_of(instance)

    def _chosen(self, candidates: Sequence[Instance], placing: Placing) -> Instance:
        loads = {candidate.dialed: self._book.load_of(candidate) for candidate in candidates}
        return self._policy.choose(candidates, loads, placing)
