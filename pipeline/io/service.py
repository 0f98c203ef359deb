"""The gRPC server of an instance: `Generation`, `Bootstrap`, `Admin`, standard health and reflection.

In: the supervisor's state. Out: answers about it. Invariants: it answers in every phase; health is
SERVING exactly while requests are taken; a second daemon on the same port is an error, not a sharing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
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
)
from pipeline.io.address import BadAddress
from pipeline.io.generation import GenerationService
from pipeline.io.incarnation import RankView
from pipeline.io.instance_config import model_name
from pipeline.io.supervisor import Phase, Supervisor
from security.channels import bind
from security.noise import count_noise
from security.secrets import Secrets
from transfer.messages import PROTOCOL_VERSION

_LARGEST_MESSAGE = 16 << 20
_UINT32, _UINT64 = (1 << 32) - 1, (1 << 64) - 1
_ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    bootstrap_pb2.DESCRIPTOR.services_by_name["Bootstrap"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)


class InstanceService(bootstrap_pb2_grpc.BootstrapServicer, admin_pb2_grpc.AdminServicer):
    """What an instance is, and how its ranks are."""

    def __init__(self, supervisor: Supervisor, max_model_len: int) -> None:
        self.address = ""  # known once the server is bound
        self._supervisor = supervisor
        self._max_model_len = max_model_len
        self._noise = count_noise(logging.getLogger("grpc._cython.cygrpc"), "malformed gRPC messages", (DecodeError,))

    async def Describe(self, request: bootstrap_pb2.DescribeRequest, context: Any) -> bootstrap_pb2.DescribeResponse:  # type: ignore[override]
        supervisor, config, facts = self._supervisor, self._supervisor.config, self._supervisor.facts
        current = supervisor.incarnation
        return bootstrap_pb2.DescribeResponse(
            instance=self._instance(),
            role=_ROLES[config.role],
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
            pages=_clamp(supervisor.pages, _UINT32),
            ranks=[self._rank_description(view) for view in current.ranks] if current else [],
            vocab_size=facts.vocab_size,
            transfer_backend=current.backend if current else "",
        )

    async def Status(self, request: admin_pb2.StatusRequest, context: Any) -> admin_pb2.StatusResponse:  # type: ignore[override]
        supervisor = self._supervisor
        current = supervisor.incarnation
        ranks = []
        if current is not None:
            silent = await current.ask_status()
            ranks = [_rank_status(view, view.config.rank not in silent) for view in current.ranks]
            ranks[0].counters["daemon_frames_dropped"] = current.frames_dropped
            ranks[0].counters["daemon_messages_malformed"] = self._noise.count
            ranks[0].counters["daemon_events_unclaimed"] = supervisor.attempts.unknown
        return admin_pb2.StatusResponse(
            instance=self._instance(),
            role=_ROLES[supervisor.config.role],
            phase=supervisor.phase,
            ranks=ranks,
            restarts=supervisor.restarts,
            last_failure=supervisor.last_failure,
            pid=os.getpid(),
        )

    def _instance(self) -> common_pb2.InstanceRef:
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


def _rank_status(view: RankView, answered: bool) -> admin_pb2.RankStatus:
    """`view`'s last report; a rank that never reported still has a process and an epoch."""
    status = admin_pb2.RankStatus(
        rank=view.config.rank,
        pid=view.child.pid,
        answered=answered,
        layer_begin=view.config.layer_begin,
        layer_end=view.config.layer_end,
        epoch=view.config.epoch,
        applied_seq=_clamp(view.applied_seq, _UINT64),
    )
    if (report := view.report) is not None:
        status.applied_seq = _clamp(report.applied_seq, _UINT64)  # the one its digest belongs to
        status.digest = report.digest
        status.queues.update(_clamped(report.queues, _UINT32))
        status.requests.update(_clamped(report.requests, _UINT32))
        status.pages.update(_clamped(report.pages, _UINT32))
        status.rooms = _clamp(report.rooms, _UINT32)
        status.store_entries = _clamp(report.store_entries, _UINT32)
        status.transfer_handles = _clamp(report.transfer_handles, _UINT32)
        status.last_progress_s = report.last_progress_s
        status.counters.update(_clamped(report.counters, _UINT64))
        status.executing = report.executing
        status.audit = report.audit
    return status


def _clamp(value: int, most: int) -> int:
    """A rank's number must not be able to break the answer about all ranks."""
    return min(max(value, 0), most)


def _clamped(values: Mapping[str, int], most: int) -> dict[str, int]:
    return {name: _clamp(value, most) for name, value in values.items()}


class Server:
    """Binds, serves, and keeps the health service in step with the phase."""

    def __init__(self, supervisor: Supervisor, max_model_len: int, secrets: Secrets | None) -> None:
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
        self.instance = InstanceService(supervisor, max_model_len)
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationService(supervisor, max_model_len), self._server)
        bootstrap_pb2_grpc.add_BootstrapServicer_to_server(self.instance, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self.instance, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        supervisor.on_phase = self._show_phase

    async def start(self, listen: str) -> int:
        """Starts answering; returns the port. Raises `BadAddress` if it cannot be bound."""
        await self._set_health(False)
        try:
            port = bind(self._server, listen, self._secrets)
        except RuntimeError as error:
            port, why = 0, f": {error}"
        else:
            why = ""
        if not port:
            raise BadAddress(
                f"cannot listen on {listen}: the port is in use, or the address is not one of this host{why}"
            )
        await self._server.start()
        return port

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)

    def _show_phase(self, phase: Phase) -> None:
        # In the background: a stuck watcher of the health service must not hold up supervision.
        healthy = phase is Phase.SERVING and not self._supervisor.stalled
        task = asyncio.get_running_loop().create_task(self._set_health(healthy))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _set_health(self, healthy: bool) -> None:
        state = health_pb2.HealthCheckResponse
        status = state.SERVING if healthy else state.NOT_SERVING
        for name in ("", *_SERVICES):
            await self._health.set(name, status)
