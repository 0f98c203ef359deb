"""What a member answers to those who look after processes: the standard gRPC health service, and nothing else.

In: whether it belongs to a leader's group. Out: SERVING exactly while it does; for the name "live" always.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from paceline_proto.v1 import group_pb2
from pipeline.io.address import bind_or_say
from security.secrets import Secrets

_SERVICES = ("", group_pb2.DESCRIPTOR.services_by_name["Group"].full_name)


class MemberHealth:
    def __init__(self, secrets: Secrets | None) -> None:
        self._secrets = secrets
        self._server: Any = grpc.aio.server(options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=64)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, listen: str) -> int:
        """Returns the port. Raises `BadAddress` if it cannot be bound."""
        await self.show(False)
        # A kubelet's liveness probe asks for this name: to wait for a leader is no reason to be killed.
        await self._health.set("live", health_pb2.HealthCheckResponse.SERVING)
        port = bind_or_say(self._server, listen, self._secrets)
        await self._server.start()
        return port

    async def show(self, attending: bool) -> None:
        state = health_pb2.HealthCheckResponse
        for name in _SERVICES:
            await self._health.set(name, state.SERVING if attending else state.NOT_SERVING)

    async def stop(self) -> None:
        await self._server.stop(None)
