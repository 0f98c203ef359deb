"""A scripted prefill and decode instance and the real gateway together, on loopback ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from gateway.app import Listening, listening
from gateway.config import GatewayConfig
from tests.gateway.scripted_instances import Script, ScriptedInstance, scripted_decode, scripted_prefill


@dataclass
class Cluster:
    prefill: ScriptedInstance
    decode: ScriptedInstance
    server: Listening
    client: openai.AsyncOpenAI

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@asynccontextmanager
async def cluster(
    model: Path, prefill: Script | ScriptedInstance, decode: Script | ScriptedInstance, **config: Any
) -> AsyncIterator[Cluster]:
    """One scripted pair behind the real gateway, with OpenAI's own client in front."""
    first = prefill if isinstance(prefill, ScriptedInstance) else scripted_prefill(prefill)
    second = decode if isinstance(decode, ScriptedInstance) else scripted_decode(decode)
    async with first.serving(), second.serving():
        settings = {
            "model": model,
            "model_name": "m",
            "port": 0,
            "prefill": (first.address,),
            "decode": (second.address,),
            "drain_s": 0.5,
            "shutdown_grace_s": 0.5,
            "pair_wait_s": 0.0,
            "describe_interval_s": 0.2,
        }
        async with listening(GatewayConfig(**(settings | config))) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
                await until(lambda: server.gateway.why_unavailable() is None or first.facts or second.facts)
                yield Cluster(first, second, server, client)


async def until(condition: Callable[[], Any], within_s: float = 10.0) -> None:
    """Waits for what other tasks bring about; fails if it does not come."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """One asynchronous test on a loop of its own."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())
