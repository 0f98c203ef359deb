"""What all handlers of one gateway share, and the two ways in and out of it.

In: admitted requests and their jobs. Out: started courses. Invariants: `in_flight`, which counts every
choice of a request, never exceeds `max_inflight`; every started course is in `_courses` until its request has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from gateway.attempt import Background
from gateway.config import GatewayConfig
from gateway.course import Course, Means
from gateway.errors import ApiError, too_busy, unavailable
from gateway.generation_job import Job, Limits
from gateway.metrics import Metrics
from gateway.model_files import ModelFiles
from gateway.policies import policy_named
from gateway.registry import Endpoints, Registry
from gateway.registry_server import RegistryServer
from gateway.router import Router
from gateway.terms import Terms
from security.secrets import load_if
from telemetry.otlp import make_tracer

_LONG_TEXT = 32_768  # characters; tokenizing more would hold up the streams of others


class Gateway:
    def __init__(self, config: GatewayConfig, files: ModelFiles) -> None:
        self.config = config
        self.files = files
        self.metrics = Metrics()
        self.tracer = make_tracer(config.otlp, "paceline-gateway", f"{config.host}:{config.port}")
        self.router = Router(policy_named(config.policy, random.randrange))
        self._secrets = load_if(config.secrets)
        self.registry = Registry(config, self._secrets, files.highest_token_id, self.router.reported, self.router.keep)
        self.registry_port = 0  # of the server where instances register, if there is one
        self.stopping = False
        self.in_flight = 0
        self._background = Background()
        self._means = Means(config, self.registry, self.router, self.metrics, self._background)
        self._idle = asyncio.Event()
        self._idle.set()
        self._courses: dict[str, Course] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.registry.set_endpoints(Endpoints(self.config.prefill, self.config.decode))
        self.registry.start()
        server = RegistryServer(self.registry, self.config.lease_s, self._secrets) if self.config.registry else None
        try:
            if server is not None:
                self.registry_port = await server.start(self.config.registry)
            yield
        finally:
            await self._background.close()
            if server is not None:
                await server.stop()
            await self.registry.close()
            self.tracer.close()

    def limits(self) -> Limits:
        """What some pair takes that serves now, or the model itself while none does."""
        fleet, largest = self.registry.fleet, self.files.max_model_len
        return Limits(fleet.context_limit or largest, self.files.vocab_size, fleet.common_limit or largest)

    async def pair_awaited(self, patience_s: float) -> None:
        """Waits a little while no pair serves: a restart is often over soon, and a new gateway learns who is there."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self.config.pair_wait_s, patience_s)):
                while self.registry.fleet.why_no_pair() is not None and not self.stopping:
                    await self.registry.change()

    def why_unavailable(self) -> str | None:
        return "the gateway is stopping" if self.stopping else self.registry.fleet.why_no_pair()

    @contextmanager
    def admitted(self, places: int = 1) -> Iterator[None]:
        """A place for a generation request, from its arrival to its end, or places for its further choices."""
        if self.stopping:
            raise unavailable("the gateway is stopping")
        if self.in_flight + places > self.config.max_inflight:
            raise too_busy(self.config.max_inflight)
        self.in_flight += places
        self._idle.clear()
        self.metrics.in_flight.inc(places)
        try:
            yield
        finally:
            self.in_flight -= places
            if self.in_flight == 0:
                self._idle.set()
            self.metrics.in_flight.dec(places)

    @contextmanager
    def course(self, request_id: str, job: Job, terms: Terms, arrived: float) -> Iterator[Course]:
        """A started choice of a request. Leaving early ends it on both sides."""
        course = Course(self._means, request_id, job, self.ending_ids(job), terms, arrived)
        self._courses[request_id] = course
        try:
            yield course
        except ApiError:
            course.cancel("another choice of its request failed")  # its own failure has ended it already
            raise
        finally:
            del self._courses[request_id]
            course.cancel("client went away")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(self.files.encode, text, add_special_tokens)
        return self.files.encode(text, add_special_tokens)

    def ending_ids(self, job: Job) -> tuple[int, ...]:
        """Token ids that end the request."""
        eos = () if job.sampling.ignore_eos else tuple(self.files.eos_ids)
        return (*job.sampling.stop_token_ids, *eos)

    async def drain(self) -> None:
        """Takes no new requests, gives those in flight the grace, then ends them."""
        self.stopping = True
        await self._idle_within(self.config.shutdown_grace_s)
        for course in list(self._courses.values()):
            course.cancel("the gateway is stopping", "UNAVAILABLE")
        await self._idle_within(1.0)

    async def _idle_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
