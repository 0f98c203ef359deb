"""How one instance is chosen among several that would do.

In: candidates of one side, the load of each, what is to be placed. Out: one candidate. Pure. A policy never
looks at anything but its arguments, so that a decision can be replayed; one that remembers (which instance
has which prefix, say) keeps that in itself, and learns from its own choices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.instances import Instance, Side

_ALIKE = 1.05  # loads that differ by less are told apart by other things


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request may occupy, in tokens."""

    prompt: int
    output: int  # the most it may generate

    def on(self, side: Side) -> int:
        # Prefill computes the prompt; decode holds pages for prompt and output.
        return self.prompt if side is Side.PREFILL else self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Placing:
    """A request that needs an instance."""

    cost: Cost
    session: str = ""  # requests of one session had better meet again; empty: of none
    prompt_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance has to do, as far as this gateway knows."""

    tokens: int = 0  # still to be computed on the prefill side, held on the decode side
    requests: int = 0
    rate: float = 0.0  # tokens that prefill computes per second, or that decode's pool holds; 0: not known
    last_chosen: int = 0  # number of the routing decision that last chose it; 0: never


class Policy(Protocol):
    def choose(self, candidates: Sequence[Instance], loads: Mapping[str, Load], placing: Placing) -> Instance:
        """One of the candidates, of which there is at least one. `loads` by the address that is dialled."""


class LeastWork:
    """Where the work would be done first; among equals, fewest requests, then the longest not chosen.

    Work is tokens over rate (seconds of prefill, share of decode's pool), or tokens alone as long as the
    rate of any candidate is not known.
    """

    def choose(self, candidates: Sequence[Instance], loads: Mapping[str, Load], placing: Placing) -> Instance:
        known = [loads.get(candidate.dialed, Load()) for candidate in candidates]
        comparable = all(load.rate > 0.0 for load in known)
        work = [
            (load.tokens + placing.cost.on(candidate.side)) / (load.rate if comparable else 1.0)
            for candidate, load in zip(candidates, known, strict=True)
        ]
        least = _ALIKE * min(work)
        alike = [at for at in range(len(candidates)) if work[at] <= least]
        return candidates[min(alike, key=lambda at: (known[at].requests, known[at].last_chosen))]


class PowerOfTwo:
    """The one with less work of two that chance names: gateways that know the same do not all do the same."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        """`draw(n)`: a random number from 0 to n-1."""
        self._draw, self._least_work = draw, LeastWork()

    def choose(self, candidates: Sequence[Instance], loads: Mapping[str, Load], placing: Placing) -> Instance:
        if len(candidates) > 2:
            first = self._draw(len(candidates))
            second = (first + 1 + self._draw(len(candidates) - 1)) % len(candidates)
            candidates = (candidates[first], candidates[second])
        return self._least_work.choose(candidates, loads, placing)


class BySession:
    """The same instance for a session as long as it is there (rendezvous hashing): when one comes or goes, only the
    sessions that it gets or had move. Requests without a session go where there is least work.
    """

    def __init__(self) -> None:
        self._least_work = LeastWork()

    def choose(self, candidates: Sequence[Instance], loads: Mapping[str, Load], placing: Placing) -> Instance:
        if not placing.session:
            return self._least_work.choose(candidates, loads, placing)
        return max(candidates, key=lambda candidate: _score(placing.session, candidate.instance_id))


class RoundRobin:
    """The longest not chosen."""

    def choose(self, candidates: Sequence[Instance], loads: Mapping[str, Load], placing: Placing) -> Instance:
        return min(candidates, key=lambda candidate: loads.get(candidate.dialed, Load()).last_chosen)


POLICIES = ("least-work", "power-of-two", "session", "round-robin")


def policy_named(name: str, draw: Callable[[int], int]) -> Policy:
    """Raises `ValueError`."""
    match name:
        case "least-work":
            return LeastWork()
        case "power-of-two":
            return PowerOfTwo(draw)
        case "session":
            return BySession()
        case "round-robin":
            return RoundRobin()
    raise ValueError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")


def _score(session: str, instance_id: str) -> bytes:
    """The same in every process and at all times, unlike `hash`."""
    return hashlib.blake2b(f"{instance_id}\0{session}".encode(errors="replace"), digest_size=8).digest()
