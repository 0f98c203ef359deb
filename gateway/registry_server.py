"""The gRPC server at which instances register, and operators watch who has.

In: calls of the service `Registry`. Out: what the gateway's `Registry` makes of them. Invariants: what is not
well-formed reaches nothing behind it; instances and watchers are bounded in number, messages in size.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from gateway.instances import LONGEST_NAME, is_name
from gateway.registry import MOST_INSTANCES, Registry
from paceline_proto.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from security.channels import bind
from security.secrets import Secrets

log = logging.getLogger("paceline.gateway")

_MOST_WATCHERS = 16
_WATCH_EVERY_S = 1.0
_LARGEST_MESSAGE = 1 << 20
_HEARTBEATS_PER_LEASE = 5


class RegistryServer:
    def __init__(self, registry: Registry, lease_s: float, secrets: Secrets | None) -> None:
        self._secrets = secrets
        self._server: Any = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
                ("grpc.http2.min_ping_interval_without_data_ms", 4000),  # instances ping every 5 s
                ("grpc.keepalive_time_ms", 30_000),  # notices clients that vanished without a word
                ("grpc.http2.ping_timeout_ms", 10_000),
            ],
            maximum_concurrent_rpcs=MOST_INSTANCES + _MOST_WATCHERS,
        )
        registry_pb2_grpc.add_RegistryServicer_to_server(_Service(registry, lease_s), self._server)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, address: str) -> int:
        """The port. Raises `OSError`."""
        try:
            port = bind(self._server, address, self._secrets)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        if not port:
            raise OSError(f"cannot listen on {address}: the port is in use, or the address is not one of this host")
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(None)


class _Service(registry_pb2_grpc.RegistryServicer):
    def __init__(self, registry: Registry, lease_s: float) -> None:
        self._registry = registry
        self._answer = registry_pb2.RegisterResponse(lease_s=lease_s, heartbeat_s=lease_s / _HEARTBEATS_PER_LEASE)
        self._watchers = 0

    async def Register(self, request: registry_pb2.RegisterRequest, context: Any) -> registry_pb2.RegisterResponse:  # type: ignore[override]
        description = request.description
        if wrong := _what_is_wrong(description.instance, description.role, context.peer()):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        refusal = self._registry.register(description)
        if refusal is not None:
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if refusal.full else grpc.StatusCode.ALREADY_EXISTS
            await context.abort(status, refusal.reason)
        return self._answer

    async def Leave(self, request: registry_pb2.LeaveRequest, context: Any) -> registry_pb2.LeaveResponse:  # type: ignore[override]
        self._registry.leave(request.instance, request.reason[:LONGEST_NAME])
        return registry_pb2.LeaveResponse()

    async def Watch(  # type: ignore[override]
        self, request: registry_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        if self._watchers >= _MOST_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MOST_WATCHERS} watch already")
        self._watchers += 1
        try:
            last: bytes | None = None
            while True:
                now = self._registry.registered()
                if (told := _without_leases(now)) != last:
                    last = told
                    yield now
                await asyncio.sleep(_WATCH_EVERY_S)
        finally:
            self._watchers -= 1


def _without_leases(response: registry_pb2.WatchResponse) -> bytes:
    """What is worth an answer of its own: a lease that was renewed is not."""
    plain = registry_pb2.WatchResponse()
    plain.CopyFrom(response)
    for one in plain.instances:
        one.ClearField("lease_left_s")
    return plain.SerializeToString(deterministic=True)


def _what_is_wrong(instance: common_pb2.InstanceRef, role: int, peer: str) -> str:
    """Why it cannot register, or an empty string. `peer`: as gRPC names who calls, "ipv4:10.0.0.7:4711"."""
    if role not in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE):
        return f"role is {role}; it is prefill or decode"
    for what, value in (("instance_id", instance.instance_id), ("address", instance.address)):
        if not is_name(value):
            return f"instance.{what} has {len(value)} characters; it needs 1 to {LONGEST_NAME}, printable ones"
    host, colon, port = instance.address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return f"instance.address {instance.address!r} is not host:port"
    if _is_local(host) and not _is_local(unquote(peer).removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0]):
        return (
            f"instance.address {instance.address} is this gateway's own host, not the instance's; it needs --advertise"
        )
    return ""


def _is_local(host: str) -> bool:
    """Loopback, or no address of anybody in particular."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost" or host.startswith("unix")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified
