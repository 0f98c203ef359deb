"""How an instance empties itself: what is open may end within a deadline, the rest is let go.

In: the instance's attempts, a reason and a deadline, which may be set anew. Out: whether it drains, what is
left, and when it is empty. Invariant: once a drain's deadline has passed no attempt of before has a reader:
each was told that it may go on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time

from pipeline.io.attempts import Attempts

log = logging.getLogger(__name__)

_ABORT_GRACE_S = 1.0


class Drain:
    def __init__(self, instance: str, attempts: Attempts) -> None:
        self.reason = ""  # of the drain under way; empty: none is
        self._instance, self._attempts = instance, attempts
        self._deadline = 0.0
        self._emptying: asyncio.Task[None] | None = None

    @property
    def active(self) -> bool:
        return bool(self.reason)

    @property
    def empty(self) -> bool:
        return self.active and not len(self._attempts)

    @property
    def remaining(self) -> float:
        """Seconds until what is open is let go."""
        return max(0.0, self._deadline - time.monotonic()) if self.active else 0.0

    def begin(self, reason: str, patience: float) -> None:
        """Starts a drain, or gives the one under way another reason and deadline."""
        self.end()
        self.reason, self._deadline = reason, time.monotonic() + patience
        log.info("draining for up to %g s: %s; %d open attempts", patience, reason, len(self._attempts))
        self._emptying = asyncio.create_task(self._empty(patience))

    def end(self) -> None:
        """No drain any more; what was let go stays so."""
        self.reason = ""
        if self._emptying is not None:
            self._emptying.cancel()
            self._emptying = None

    async def done(self) -> None:
        """Waits until the drain under way, whichever it is by then, has emptied the instance."""
        while (emptying := self._emptying) is not None and not emptying.done():
            await asyncio.wait([emptying])

    async def _empty(self, patience: float) -> None:
        # What is open may end, and KV that a peer has not taken yet is still served; the rest is let go by the log.
        if await self._attempts.drained(patience):
            log.info("drained: %s", self.reason)
            return
        log.warning("%d attempts did not end within %g s and are let go", len(self._attempts), patience)
        await self._attempts.let_go(f"{self._instance} is draining: {self.reason}", _ABORT_GRACE_S)
