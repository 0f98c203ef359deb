"""What a rank says of its own progress, so that a stuck one can be named. Data only."""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Sent to rank 0 once a second by a rank whose executor is busy; `tick` 0: it waits for work."""

    rank: int
    applied: int
    tick: int
    rows: int
    seconds: float  # in this tick so far
