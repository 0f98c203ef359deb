"""The instance's `/metrics`, over HTTP, for Prometheus.

In: scrapes. Out: the text format. Invariants: the ranks are asked at most once in `FRESH_S`, however many scrape,
and have the patience of a status question to answer; one that does not is shown with its last values and `up` 0.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from pipeline.io.address import BadAddress, split_host_port
from pipeline.io.instance_metrics import InstanceCollector
from pipeline.io.supervisor import Supervisor
from security.noise import count_noise

FRESH_S = 1.0


class MetricsServer:
    def __init__(self, registry: CollectorRegistry, supervisor: Supervisor) -> None:
        self._registry, self._supervisor = registry, supervisor
        self._collector = InstanceCollector(supervisor)
        registry.register(self._collector)
        self._turn = asyncio.Lock()
        self._text, self._since = b"", float("-inf")
        malformed = Counter(
            "paceline_instance_malformed_requests", "What came to /metrics and is not HTTP", registry=registry
        )
        count_noise(server_logger, "malformed HTTP", (HttpProcessingError,), malformed.inc)
        application = web.Application(client_max_size=1024)
        application.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, listen: str) -> str:
        """Returns where it listens. Raises `BadAddress`."""
        host, port = split_host_port(listen)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=64).start()
        except OSError as error:
            raise BadAddress(f"cannot serve metrics on {listen}: {error.strerror or error}") from error
        bound = self._runner.addresses[0]
        return f"http://{bound[0]}:{bound[1]}/metrics"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        async with self._turn:
            if time.monotonic() - self._since >= FRESH_S:
                current = self._supervisor.incarnation
                self._collector.silent = await current.ask_status() if current is not None else set()
                self._text, self._since = generate_latest(self._registry), time.monotonic()
        return web.Response(body=self._text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
