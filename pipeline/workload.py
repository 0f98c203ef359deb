"""What an instance has to do, and how fast it gets on.

In: what rank 0 reads off its replica about once a second, and when. Out: `Workload` as gateways are told it,
and the speed of prefill. Pure. The speed is measured only between two readings that both found prompts
queued: an idle instance is not a slow one, though no slower than what it did get done. One that was not measured for
long is not known any more: if work was turned away because of it, nothing would ever show that it has changed.
"""

from __future__ import annotations

import math

import msgspec

_MEMORY_S = 20.0  # a reading this old counts 1/e
_FORGET_S = 60.0


class Workload(msgspec.Struct, frozen=True):
    """One reading."""

    queued_tokens: int = 0  # of prompts, not computed yet
    free_pages: int = 0
    requests: int = 0
    batch: int = 0  # requests that take part in microbatches
    computed: int = 0  # prompt tokens, since the ranks were started


class Speed:
    def __init__(self) -> None:
        self.per_second = 0.0  # prompt tokens; 0: not known yet
        self._last: tuple[float, Workload] | None = None
        self._measured = -math.inf

    def note(self, now: float, workload: Workload) -> None:
        last, self._last = self._last, (now, workload)
        if now - self._measured > _FORGET_S:
            self.per_second = 0.0
        if last is None:
            return
        seconds, tokens = now - last[0], workload.computed - last[1].computed
        if seconds <= 0.0 or tokens < 0:  # other ranks count anew
            return
        if not last[1].queued_tokens or not workload.queued_tokens:
            if self.per_second:
                self.per_second = max(self.per_second, tokens / seconds)
            return
        self._measured = now
        kept = math.exp(-seconds / _MEMORY_S) if self.per_second else 0.0
        self.per_second = kept * self.per_second + (1.0 - kept) * tokens / seconds
