"""gRPC with mutual TLS: members of one cluster understand each other, nobody else gets a word in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from security.channels import bind, dial, dial_blocking
from security.folder import make
from security.secrets import Secrets

DEADLINE = 3.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make(tmp_path_factory.mktemp("ours") / "secrets")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make(tmp_path_factory.mktemp("theirs") / "secrets")


@asynccontextmanager
async def server(secrets: Secrets | None) -> AsyncIterator[str]:
    serving = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), serving)
    port = bind(serving, "127.0.0.1:0", secrets)
    await serving.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await serving.stop(None)


async def answered(channel: grpc.aio.Channel) -> bool:
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
    return True


async def _call(who: str, ours: Secrets, theirs: Secrets, address: str) -> bool:
    if who == "no certificate":
        trusting = grpc.ssl_channel_credentials(ours.authority)
        options = [("grpc.ssl_target_name_override", "localhost")]
        return await answered(grpc.aio.secure_channel(address, trusting, options=options))
    return await answered(dial(address, {"member": ours, "plain": None, "other cluster": theirs}[who]))


@pytest.mark.parametrize(
    ("who", "welcome"), [("member", True), ("plain", False), ("other cluster", False), ("no certificate", False)]
)
def test_only_members_of_the_cluster_are_answered(who: str, welcome: bool, ours: Secrets, theirs: Secrets) -> None:
    async def scenario() -> bool:
        async with server(ours) as address:
            return await _call(who, ours, theirs, address)

    assert asyncio.run(scenario()) is welcome


def test_a_member_tells_nothing_to_an_impostor(ours: Secrets, theirs: Secrets) -> None:
    async def scenario() -> list[bool]:
        async with server(theirs) as other, server(None) as plain:
            return [await answered(dial(address, ours)) for address in (other, plain)]

    assert asyncio.run(scenario()) == [False, False]


def test_a_waiting_caller_speaks_the_same_way(ours: Secrets) -> None:
    def check(address: str) -> None:
        with dial_blocking(address, ours, [("grpc.keepalive_time_ms", 10_000)]) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE)

    async def scenario() -> None:
        async with server(ours) as address:
            await asyncio.to_thread(check, address)

    asyncio.run(scenario())


def test_without_secrets_it_is_plain(ours: Secrets) -> None:
    async def scenario() -> bool:
        async with server(None) as address:
            return await answered(dial(address, None))

    assert asyncio.run(scenario())


def test_a_certificate_is_also_for_the_names_it_was_made_for(tmp_path: Path) -> None:
    """Other gRPC clients check the name that they dialled."""
    secrets = make(tmp_path / "secrets", ["gateway.example.org"])
    credentials = grpc.ssl_channel_credentials(secrets.authority, secrets.key, secrets.certificate)

    async def scenario() -> list[bool]:
        async with server(secrets) as address:
            names = ("gateway.example.org", "localhost", "elsewhere.example.org")
            options = [[("grpc.ssl_target_name_override", name)] for name in names]
            return [await answered(grpc.aio.secure_channel(address, credentials, options=o)) for o in options]

    assert asyncio.run(scenario()) == [True, True, False]
