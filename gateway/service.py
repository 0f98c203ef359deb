"""What all handlers of one gateway share, and the two ways in and out of it.

In: admitted requests and their jobs. Out: started attempts. Invariants: `in_flight` never exceeds
`max_inflight`; every started attempt is in `_attempts` until its request has ended; each pair the
router chose is given back once per side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from gateway.attempt import Attempt, Background
from gateway.config import GatewayConfig
from gateway.errors import too_busy, unavailable
from gateway.generation_job import Job, Limits
from gateway.instances import Side
from gateway.metrics import Metrics
from gateway.model_files import ModelFiles
from gateway.registry import Endpoints, Registry
from gateway.router import Cost, Router


class Gateway:
    def __init__(self, config: GatewayConfig, files: ModelFiles) -> None:
        self.config = config
        self.files = files
        self.metrics = Metrics()
        self.registry = Registry(config, files.highest_token_id)
        self.router = Router()
        self.stopping = False
        self.in_flight = 0
        self._background = Background()
        self._idle = asyncio.Event()
        self._idle.set()
        self._attempts: dict[str, Attempt] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.registry.set_endpoints(Endpoints(self.config.prefill, self.config.decode))
        try:
            yield
        finally:
            await self._background.close()
            await self.registry.close()

    def limits(self) -> Limits:
        """What fits every instance that serves now, or the model itself while none does."""
        return Limits(self.registry.fleet.context_limit() or self.files.max_model_len, self.files.vocab_size)

    def why_unavailable(self) -> str | None:
        return "the gateway is stopping" if self.stopping else self.registry.fleet.why_no_pair()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A place for one generation request, from its arrival to its end."""
        if self.stopping:
            raise unavailable("the gateway is stopping")
        if self.in_flight >= self.config.max_inflight:
            raise too_busy(self.config.max_inflight)
        self.in_flight += 1
        self._idle.clear()
        self.metrics.in_flight.inc()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()
            self.metrics.in_flight.dec()

    @contextmanager
    def attempt(self, request_id: str, number: int, job: Job) -> Iterator[Attempt]:
        """A started attempt on a freshly chosen pair. Leaving early ends it on both sides."""
        cost = Cost(len(job.prompt_ids), job.sampling.max_tokens)
        pair = self.router.choose(self.registry.fleet, cost)
        if isinstance(pair, str):
            raise unavailable(pair)
        links = {side: self.registry.link(pair.of(side)) for side in Side}
        attempt = Attempt(
            request_id=request_id,
            number=number,
            pair=pair,
            links={side: link for side, link in links.items() if link is not None},
            config=self.config,
            background=self._background,
            on_side_end=lambda side: self.router.ended(pair.of(side), cost),
            on_broken=lambda side, unreachable: self.registry.failed(pair.of(side), unreachable),
        )
        self._attempts[request_id] = attempt
        attempt.start(job)
        try:
            yield attempt
        finally:
            del self._attempts[request_id]
            attempt.cancel("client went away")

    async def drain(self) -> None:
        """Takes no new requests, gives those in flight the grace, then ends them."""
        self.stopping = True
        await self._idle_within(self.config.shutdown_grace_s)
        for attempt in list(self._attempts.values()):
            attempt.cancel("the gateway is stopping", "UNAVAILABLE")
        await self._idle_within(1.0)

    async def _idle_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
