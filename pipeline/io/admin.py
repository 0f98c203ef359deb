"""The `Admin` service of an instance: what operators and tests ask of it, and what they tell it.

In: gRPC calls. Out: the state of daemon and ranks; drains, dumps and log levels passed on. Invariants: a rank's
nonsense or silence never breaks an answer about the others; nothing here is unbounded, loggers included;
a refusal names the field, the value and what would do.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from paceline_proto.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from pipeline.io import control
from pipeline.io.incarnation import RankView
from pipeline.io.supervisor import Stopping, Supervisor
from security.noise import count_noise

log = logging.getLogger(__name__)

UINT32, UINT64 = (1 << 32) - 1, (1 << 64) - 1
ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
# A fixed list: a logger once named stays for ever.
LOGGERS = ("", "paceline", "pipeline", "prefill", "decode", "consensus", "transfer", "engine")
_LONGEST_REASON = 200
_LONGEST_DRAIN_S = 86400.0


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(self, supervisor: Supervisor, reference: Callable[[], common_pb2.InstanceRef]) -> None:
        self._supervisor, self._reference = supervisor, reference
        self._noise = count_noise(logging.getLogger("grpc._cython.cygrpc"), "malformed gRPC messages", (DecodeError,))

    async def Status(self, request: admin_pb2.StatusRequest, context: Any) -> admin_pb2.StatusResponse:  # type: ignore[override]
        supervisor = self._supervisor
        current = supervisor.incarnation
        ranks = []
        if current is not None:
            silent = await current.ask_status()
            ranks = [_rank_status(view, view.config.rank not in silent) for view in current.ranks]
            if supervisor.config.group_size > 1:
                for status, view in zip(ranks, current.ranks, strict=True):
                    status.host = view.config.host
            ranks[0].counters["daemon_frames_dropped"] = current.frames_dropped
            ranks[0].counters["daemon_messages_malformed"] = self._noise.count
            ranks[0].counters["daemon_events_unclaimed"] = supervisor.attempts.unknown
        return admin_pb2.StatusResponse(
            instance=self._reference(),
            role=ROLES[supervisor.config.role],
            phase=supervisor.phase,
            ranks=ranks,
            restarts=supervisor.restarts,
            last_failure=supervisor.last_failure,
            pid=os.getpid(),
            open_attempts=len(supervisor.attempts),
            drain=self._drain_state(),
        )

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:  # type: ignore[override]
        reason = await _checked_reason(request.reason, context)
        patience = self._supervisor.config.drain_timeout
        if request.HasField("deadline_s"):
            patience = request.deadline_s
        if not math.isfinite(patience) or not 0 <= patience <= _LONGEST_DRAIN_S:
            limit = f"it must be between 0 and {_LONGEST_DRAIN_S:g}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"deadline_s is {patience:g}; {limit}")
        try:
            self._supervisor.drain(reason or "asked for by an operator", patience)
        except Stopping as stopping:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(stopping))
        return admin_pb2.DrainResponse(phase=self._supervisor.phase, open_attempts=len(self._supervisor.attempts))

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Any) -> admin_pb2.ResumeResponse:  # type: ignore[override]
        try:
            self._supervisor.resume()
        except Stopping as stopping:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(stopping))
        return admin_pb2.ResumeResponse(phase=self._supervisor.phase)

    async def DumpFlight(self, request: admin_pb2.DumpFlightRequest, context: Any) -> admin_pb2.DumpFlightResponse:  # type: ignore[override]
        reason = await _checked_reason(request.reason, context)
        current = self._supervisor.incarnation
        if current is None or not current.ready.is_set():
            why = f"the ranks are not ready: {self._supervisor.not_serving_reason()}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        assert current is not None
        dumps = await current.dump_flight(reason or "asked for by an operator")
        silent = control.Dumped(0, "", "it did not answer in time")
        found = [(view.config.rank, dumps.get(view.config.rank, silent)) for view in current.ranks]
        return admin_pb2.DumpFlightResponse(
            ranks=[admin_pb2.RankDump(rank=rank, path=dump.path, error=dump.error) for rank, dump in found]
        )

    async def SetLogLevel(self, request: admin_pb2.SetLogLevelRequest, context: Any) -> admin_pb2.SetLogLevelResponse:  # type: ignore[override]
        for field, value, known in (("level", request.level, LEVELS), ("logger", request.logger, LOGGERS)):
            if value not in known:
                names = ", ".join(name or '"" (everything)' for name in known)
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"{field} is {value[:40]!r}; it is one of {names}"
                )
        logging.getLogger(request.logger or None).setLevel(request.level)
        self._supervisor.log_levels[request.logger] = request.level
        current = self._supervisor.incarnation
        silent = []
        if current is not None and current.ready.is_set():  # others are told when they are ready
            silent = current.tell_all(control.SetLogLevel(request.logger, request.level))
        return admin_pb2.SetLogLevelResponse(silent_ranks=silent)

    def _drain_state(self) -> admin_pb2.DrainState | None:
        drain = self._supervisor.draining
        if not drain.active:
            return None
        return admin_pb2.DrainState(reason=drain.reason, remaining_s=drain.remaining, empty=drain.empty)


async def _checked_reason(reason: str, context: Any) -> str:
    if len(reason) > _LONGEST_REASON or not reason.isprintable():
        limit = f"it may have {_LONGEST_REASON}, all of them printable"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"reason has {len(reason)} characters; {limit}")
    return reason


def _rank_status(view: RankView, answered: bool) -> admin_pb2.RankStatus:
    """`view`'s last report; a rank that never reported still has a process and an epoch."""
    status = admin_pb2.RankStatus(
        rank=view.config.rank,
        pid=view.child.pid,
        answered=answered,
        layer_begin=view.config.layer_begin,
        layer_end=view.config.layer_end,
        epoch=view.config.epoch,
        applied_seq=clamp(view.applied_seq, UINT64),
    )
    if (report := view.report) is not None:
        status.applied_seq = clamp(report.applied_seq, UINT64)  # the one its digest belongs to
        status.digest = report.digest
        status.queues.update(_clamped(report.queues, UINT32))
        status.requests.update(_clamped(report.requests, UINT32))
        status.pages.update(_clamped(report.pages, UINT32))
        status.rooms = clamp(report.rooms, UINT32)
        status.store_entries = clamp(report.store_entries, UINT32)
        status.transfer_handles = clamp(report.transfer_handles, UINT32)
        status.last_progress_s = report.last_progress_s
        status.counters.update(_clamped(report.counters, UINT64))
        status.executing = report.executing
        status.audit = report.audit
    return status


def clamp(value: int, most: int) -> int:
    """A rank's number must not be able to break the answer about all ranks."""
    return min(max(value, 0), most)


def _clamped(values: Mapping[str, int], most: int) -> dict[str, int]:
    return {name: clamp(value, most) for name, value in values.items()}
