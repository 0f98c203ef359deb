"""The gRPC server of an instance: `Generation`, `Bootstrap`, `Admin`, `Timeline`, standard health and reflection.

In: the supervisor's state. Out: answers about it. Invariants: it answers in every phase; health is
SERVING exactly while requests are taken; a second daemon on the same port is an error, not a sharing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from paceline_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    bootstrap_pb2,
    bootstrap_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    group_pb2,
    group_pb2_grpc,
    timeline_pb2,
    timeline_pb2_grpc,
)
from pipeline.io.address import bind_or_say
from pipeline.io.admin import ROLES, UINT32, UINT64, AdminService, clamp
from pipeline.io.generation import GenerationService
from pipeline.io.group.leader import Group
from pipeline.io.incarnation import RankView
from pipeline.io.instance_config import model_name
from pipeline.io.observers import Observers
from pipeline.io.release import release
from pipeline.io.supervisor import Phase, Supervisor
from pipeline.io.timeline_service import TimelineService
from security.secrets import Secrets
from transfer.messages import PROTOCOL_VERSION

_LARGEST_MESSAGE = 16 << 20
_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    bootstrap_pb2.DESCRIPTOR.services_by_name["Bootstrap"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
    timeline_pb2.DESCRIPTOR.services_by_name["Timeline"].full_name,
)


class InstanceService(bootstrap_pb2_grpc.BootstrapServicer):
    """What an instance is."""

    def __init__(self, supervisor: Supervisor, max_model_len: int) -> None:
        self.address = ""  # known once the server is bound
        self._supervisor = supervisor
        self._max_model_len = max_model_len

    async def Describe(self, request: bootstrap_pb2.DescribeRequest, context: Any) -> bootstrap_pb2.DescribeResponse:  # type: ignore[override]
        return self.describe()

    def describe(self) -> bootstrap_pb2.DescribeResponse:
        """The instance as it is now; also what its heartbeats carry."""
        supervisor, config, facts = self._supervisor, self._supervisor.config, self._supervisor.facts
        current = supervisor.incarnation
        return bootstrap_pb2.DescribeResponse(
            instance=self.reference(),
            role=ROLES[config.role],
            serving=supervisor.serving,
            not_serving_reason=supervisor.not_serving_reason(),
            protocol_version=PROTOCOL_VERSION,
            model_name=model_name(config),
            model_digest=facts.digest,
            num_layers=facts.num_layers,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            page_size=config.page_size,
            kv_dtype=config.dtype,
            max_model_len=self._max_model_len,
            pages=clamp(supervisor.pages, UINT32),
            ranks=[self._rank_description(view) for view in current.ranks] if current else [],
            vocab_size=facts.vocab_size,
            transfer_backend=current.backend if current else "",
            draining=supervisor.phase is Phase.DRAINING,
            load=self._load(),
            software_version=release(),
        )

    def _load(self) -> bootstrap_pb2.Load:
        workload = self._supervisor.workload
        return bootstrap_pb2.Load(
            queued_prefill_tokens=clamp(workload.queued_tokens, UINT64),
            free_pages=clamp(workload.free_pages, UINT32),
            requests=clamp(workload.requests, UINT32),
            batch=clamp(workload.batch, UINT32),
            prefill_tokens_per_second=self._supervisor.speed.per_second,
        )

    def reference(self) -> common_pb2.InstanceRef:
        return common_pb2.InstanceRef(
            instance_id=self._supervisor.config.instance, address=self.address, epoch=self._supervisor.epoch
        )

    def _rank_description(self, view: RankView) -> bootstrap_pb2.RankDescription:
        return bootstrap_pb2.RankDescription(
            rank=view.config.rank,
            layer_begin=view.config.layer_begin,
            layer_end=view.config.layer_end,
            link_address=view.ready.link_address if view.ready else "",
            loaded=100 * view.fraction,
        )


class Server:
    """Binds, serves, and keeps the health service in step with the phase."""

    def __init__(
        self, supervisor: Supervisor, max_model_len: int, secrets: Secrets | None, observers: Observers,
        group: Group | None,
    ) -> None:  # fmt: skip
        self._secrets = secrets
        config, self._supervisor = supervisor.config, supervisor
        self._server: Any = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
                ("grpc.max_send_message_length", _LARGEST_MESSAGE),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 4000),  # clients ping every 5 s
                ("grpc.keepalive_time_ms", 30_000),  # notices clients that vanished without a word
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.server_handshake_timeout_ms", 10_000),  # of who connects and says nothing
            ],
            maximum_concurrent_rpcs=2 * config.max_queue + 256,
        )
        self._health = HealthServicer()
        self._background: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[], None] = lambda: None  # the description is another one
        self.instance = InstanceService(supervisor, max_model_len)
        generation_pb2_grpc.add_GenerationServicer_to_server(
            GenerationService(supervisor, max_model_len, observers), self._server
        )
        told_by = self.instance.reference
        timeline_pb2_grpc.add_TimelineServicer_to_server(TimelineService(supervisor, told_by), self._server)
        bootstrap_pb2_grpc.add_BootstrapServicer_to_server(self.instance, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(supervisor, told_by), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*_SERVICES]
        if group is not None:
            group_pb2_grpc.add_GroupServicer_to_server(group, self._server)
            names.append(group_pb2.DESCRIPTOR.services_by_name["Group"].full_name)
            group.on_leave = supervisor.pause
        names += [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        supervisor.on_phase = self._show_phase

    async def start(self, listen: str) -> int:
        """Starts answering; returns the port. Raises `BadAddress` if it cannot be bound."""
        await self._set_health(False)
        # A kubelet's liveness probe asks for this name: loading and draining are no reason to be killed.
        await self._health.set("live", health_pb2.HealthCheckResponse.SERVING)
        port = bind_or_say(self._server, listen, self._secrets)
        await self._server.start()
        return port

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)

    def _show_phase(self, phase: Phase) -> None:
        # In the background: a stuck watcher of the health service must not hold up supervision.
        self.on_change()
        healthy = phase is Phase.SERVING and not self._supervisor.stalled
        task = asyncio.get_running_loop().create_task(self._set_health(healthy))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _set_health(self, healthy: bool) -> None:
        state = health_pb2.HealthCheckResponse
        status = state.SERVING if healthy else state.NOT_SERVING
        for name in ("", *_SERVICES):
            await self._health.set(name, status)
