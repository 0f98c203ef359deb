"""How much one API key may ask for. Pure: time is told.

In: a key's requests as they come and end. Out: None, or how long to wait. Invariants: never more than `inflight`
at once; over any time t never more than rate × (t + 1 s) requests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyLimits:
    requests_per_s: float = 0.0  # 0: any number
    inflight: int = 0  # 0: any number


@dataclass(slots=True)
class KeyUse:
    """Of one key."""

    inflight: int = 0
    _tokens: float | None = None  # None: never used, so the bucket is full
    _filled: float = 0.0

    def begin(self, now: float, limits: KeyLimits) -> float | None:
        """None: it may run, and `end` must follow. Otherwise the seconds after which to ask again."""
        if limits.inflight and self.inflight >= limits.inflight:
            return 1.0
        if rate := limits.requests_per_s:
            size = max(rate, 1.0)
            before = size if self._tokens is None else self._tokens
            self._tokens = min(size, before + max(0.0, now - self._filled) * rate)
            self._filled = now
            if self._tokens < 1.0:
                return (1.0 - self._tokens) / rate
            self._tokens -= 1.0
        self.inflight += 1
        return None

    def end(self) -> None:
        assert self.inflight > 0
        self.inflight -= 1
