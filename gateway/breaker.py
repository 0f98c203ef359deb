"""Keeps requests off a pair of instances whose hand-overs keep failing, for a while.

In: how hand-overs of each pair ended, and which pair was chosen. Out: from when on a pair may be used.
Pure. After `failures` in a row a pair is left alone for a pause; then one request tries it, and either
heals it or starts the next, longer pause. A pair is never left alone for more than `longest_s`, and a
try of which nobody tells the end (its client went away) lapses after the pause.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from gateway.instances import Pair

_Route = tuple[str, str]


@dataclass(slots=True)
class _Trouble:
    pause_s: float
    failures: int = 0  # in a row
    until: float = 0.0  # not to be used before
    probing: bool = False  # a request tries it


class Breaker:
    def __init__(self, failures: int = 3, pause_s: float = 1.0, longest_s: float = 30.0) -> None:
        self._failures, self._pause_s, self._longest_s = failures, pause_s, longest_s
        self._troubles: dict[_Route, _Trouble] = {}

    def due(self, pair: Pair) -> float:
        """The moment from which on the pair may be used; 0 if nothing speaks against it."""
        trouble = self._troubles.get(_route(pair)) if self._troubles else None
        return 0.0 if trouble is None else trouble.until

    def chosen(self, pair: Pair, now: float) -> None:
        """A request uses the pair. If the pair was left alone and is due, this one is the try."""
        trouble = self._troubles.get(_route(pair))
        if trouble is not None and 0.0 < trouble.until <= now:
            trouble.probing, trouble.until = True, now + trouble.pause_s

    def failed(self, pair: Pair, now: float) -> None:
        trouble = self._troubles.setdefault(_route(pair), _Trouble(self._pause_s))
        trouble.failures += 1
        if trouble.failures < self._failures:
            return
        if now < trouble.until and not trouble.probing:
            return  # it began before the pair was left alone
        trouble.probing, trouble.until = False, now + trouble.pause_s
        trouble.pause_s = min(2 * trouble.pause_s, self._longest_s)

    def succeeded(self, pair: Pair) -> None:
        self._troubles.pop(_route(pair), None)

    def keep(self, known: Container[str]) -> None:
        """Forgets pairs of which one is not among these addresses."""
        for route in [r for r in self._troubles if r[0] not in known or r[1] not in known]:
            del self._troubles[route]


def _route(pair: Pair) -> _Route:
    return pair.prefill.dialed, pair.decode.dialed
