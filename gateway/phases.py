"""Where the time to a request's first token went.

In: moments of one clock, in seconds, and the phases that instances tell of themselves. Out: `parts`, in order. Pure.
Invariant: the parts add up to the time between the arrival and the last moment given, without gaps: what a call to
an instance took beyond the instance's own phases is the way there and back ("network").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from gateway.instances import Side

# Parts of the gateway's own; those of an instance are named `side_phase`.
PARSE = "parse"  # reading and checking the request, chat template, tokenizing
ROUTE = "route"  # choosing a pair, making the calls
RESUME = "resume"  # attempts that failed before any token, and the wait for another pair
NETWORK = "network"  # gRPC between gateway and instance, both ways
DELIVER = "deliver"  # text of the first token, and writing it to the client
OWN = (PARSE, ROUTE, RESUME, DELIVER)
# Phases that instances tell; what one of another release calls otherwise is OTHER. Names become labels of metrics and
# parts of a header, so neither their number nor what is in them is an instance's to choose.
TOLD = (
    "queue", "bootstrap", "handshake", "allocation", "wait", "forward", "hand_over", "transfer", "generate",
    "retracted", "abort", "reply",
)  # fmt: skip
OTHER = "other"
_MOST_TOLD = 64


def believed(told: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Of what an instance tells, what can be a phase: each name once, and no time that is none."""
    total: dict[str, float] = {}
    for name, seconds in islice(told, _MOST_TOLD):
        if 0.0 <= seconds < math.inf:
            name = name if name in TOLD else OTHER
            total[name] = total.get(name, 0.0) + seconds
    return list(total.items())


class Breakdown:
    """Of one request. Of several attempts, and several choices, the first token counts."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.parts: list[tuple[str, float]] = []
        self.told = False  # the first token has come
        self._last = arrived
        self._attempts = -1
        self._over = False

    @property
    def total(self) -> float:
        return self._last - self.arrived

    def parsed(self, now: float) -> None:
        self._pass(PARSE, now)

    def called(self, attempt: int, now: float) -> None:
        """An attempt, counted from 0, has begun; both of its calls may say so."""
        if attempt > self._attempts and not self.told:
            self._attempts = attempt
            self._pass(ROUTE if attempt == 0 else RESUME, now)

    def heard(self, side: Side, phases: Sequence[tuple[str, float]], now: float) -> None:
        """Tokens came; of the first ones the phases are kept."""
        if self.told:
            return
        self.told = True
        took = now - self._last
        inside = sum(seconds for _, seconds in phases)
        # An instance that claims more than the call took is not believed beyond it.
        share = min(1.0, took / inside) if inside > 0 else 0.0
        self._last = now
        self.parts.append((NETWORK, max(0.0, took - inside)))
        self.parts += [(f"{side.value}_{name}", seconds * share) for name, seconds in phases]

    def delivered(self, now: float) -> None:
        """The client has been written to."""
        if self.told and not self._over:
            self._over = True
            self._pass(DELIVER, now)

    def server_timing(self) -> str:
        """As the HTTP header of that name, in milliseconds."""
        return ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in self.parts)

    def _pass(self, part: str, now: float) -> None:
        self.parts.append((part, now - self._last))
        self._last = now
