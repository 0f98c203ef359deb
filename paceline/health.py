"""Asks the parts of a cluster how they are. Each question has the caller's deadline.

In: an address. Out: an `Answer`, or an exception when there is none. Any answer counts as alive;
whether it takes work is a second thing.
"""

from __future__ import annotations

import asyncio

import aiohttp

from paceline.child import Answer
from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc
from security.channels import dial
from security.secrets import Secrets

CHANNEL_OPTIONS = (
    # A restarted daemon is found again at once, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A proxy in the environment is not for these addresses.
    ("grpc.enable_http_proxy", 0),
)


class InstanceProbe:
    """Bootstrap.Describe of one daemon, over one connection kept open."""

    def __init__(self, address: str, secrets: Secrets | None = None) -> None:
        self._channel = dial(address, secrets, CHANNEL_OPTIONS)
        self._stub = bootstrap_pb2_grpc.BootstrapStub(self._channel)

    async def __call__(self) -> Answer:
        told = await self._stub.Describe(bootstrap_pb2.DescribeRequest())
        return Answer(told.serving, describe_progress(told), describe_limit(told))

    async def close(self) -> None:
        await self._channel.close()


class GatewayProbe:
    """GET /health; 200 means that it can serve."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/health"
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self) -> Answer:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        async with self._session.get(self._url) as response:
            await response.read()
            if response.status == 200:
                return Answer(True, "serving")
            return Answer(False, "waiting for instances" if response.status == 503 else f"HTTP {response.status}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def describe_progress(told: bootstrap_pb2.DescribeResponse) -> str:
    """One short phrase for people."""
    if told.serving:
        layers = ", ".join(f"{rank.layer_begin}–{rank.layer_end - 1}" for rank in told.ranks)
        return f"serving (layers {layers}; {told.pages} pages of {told.page_size})"
    loading = [rank.loaded for rank in told.ranks if rank.loaded < 100]
    if loading:
        return f"loading {sum(rank.loaded for rank in told.ranks) / len(told.ranks):.0f} %"
    return told.not_serving_reason or "starting"


def describe_limit(told: bootstrap_pb2.DescribeResponse) -> str:
    """One line if the pool holds less than the context, else nothing."""
    room = told.pages * told.page_size
    if not told.serving or not 0 < room < told.max_model_len:
        return ""
    return (
        f"prompt plus output are limited to {room} tokens: that is what the KV pool holds ({told.pages} pages of "
        f"{told.page_size}); raise --pages or --kv-memory for the whole context of {told.max_model_len}"
    )


async def close_all(probes: list[InstanceProbe | GatewayProbe]) -> None:
    await asyncio.gather(*(probe.close() for probe in probes), return_exceptions=True)
