"""Is a silent peer lost?

In: the moments at which a peer was heard, and whether anything is open with it.
Out: whether to ping it now, and whether it counts as lost. Times are the caller's.
Silence counts only while something is open, and only from the moment it became so;
an idle pair of ranks exchanges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Liveness:
    ping_interval: float
    timeout: float
    heard_at: float
    open_since: float | None = None
    pinged_at: float = float("-inf")

    def heard(self, now: float) -> None:
        self.heard_at = now

    def watch(self, now: float, wanted: bool) -> None:
        if not wanted:
            self.open_since = None
        elif self.open_since is None:
            self.open_since = now

    def silence(self, now: float) -> float:
        return 0.0 if self.open_since is None else now - max(self.heard_at, self.open_since)

    def ping_due(self, now: float) -> bool:
        """True at most once per interval, while the peer is silent and something is open."""
        if self.open_since is None or now - max(self.heard_at, self.pinged_at) < self.ping_interval:
            return False
        self.pinged_at = now
        return True

    def lost(self, now: float) -> bool:
        return self.silence(now) >= self.timeout
