"""What operators do to running instances: drain, resume, dump, log-level.

In: whom to ask (`paceline.asked`). Out: one line per instance and
rank, exit code 1 if any instance did not do it. Instances are asked side by side; each has the caller's timeout.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from paceline.asked import Asked, Known
from paceline.health import CHANNEL_OPTIONS
from paceline.silence import why_silent
from paceline_proto.v1 import admin_pb2, admin_pb2_grpc
from security.channels import dial
from security.secrets import Secrets

_LOOK_AGAIN_S = 0.5


Action = Callable[[admin_pb2_grpc.AdminStub], Awaitable[Sequence[str]]]  # lines for people; raises `NotDone`


class NotDone(Exception):
    """The instance answered, but did not do all of it; each argument is a line for people."""


async def carry_out(action: Action, asked: Asked, names: Sequence[str]) -> int:
    on = await asked.chosen(names)
    return max(await asyncio.gather(*(_one(action, target, asked.secrets) for target in on)), default=0)


async def _one(action: Action, target: Known, secrets: Secrets | None) -> int:
    async with dial(target.address, secrets, CHANNEL_OPTIONS) as channel:
        try:
            lines, code, out = await action(admin_pb2_grpc.AdminStub(channel)), 0, sys.stdout
        except NotDone as partly:
            lines, code, out = partly.args, 1, sys.stderr
        except grpc.aio.AioRpcError as error:
            lines, code, out = [why_silent(error, target.address)], 1, sys.stderr
    for line in lines:
        print(f"{target.name or target.address}: {line}", file=out, flush=True)
    return code


def drain(reason: str, deadline: float | None, wait: bool, timeout: float) -> Action:
    """With `wait`, until the instance is empty."""

    async def action(admin: admin_pb2_grpc.AdminStub) -> Sequence[str]:
        request = admin_pb2.DrainRequest(reason=reason, deadline_s=deadline)
        told: admin_pb2.DrainResponse = await admin.Drain(request, timeout=timeout)
        lines = [f"{told.phase}, {told.open_attempts} open"]
        while wait:
            status: admin_pb2.StatusResponse = await admin.Status(admin_pb2.StatusRequest(), timeout=timeout)
            if not status.HasField("drain"):
                raise NotDone(f"the drain was undone with {status.open_attempts} open")
            if status.drain.empty:
                return [*lines, "empty"]
            await asyncio.sleep(_LOOK_AGAIN_S)
        return lines

    return action


def resume(timeout: float) -> Action:
    async def action(admin: admin_pb2_grpc.AdminStub) -> Sequence[str]:
        told: admin_pb2.ResumeResponse = await admin.Resume(admin_pb2.ResumeRequest(), timeout=timeout)
        return [told.phase]

    return action


def dump(reason: str, timeout: float) -> Action:
    async def action(admin: admin_pb2_grpc.AdminStub) -> Sequence[str]:
        told: admin_pb2.DumpFlightResponse = await admin.DumpFlight(
            admin_pb2.DumpFlightRequest(reason=reason), timeout=timeout
        )
        lines = [f"rank {rank.rank} {rank.path or f'wrote nothing: {rank.error}'}" for rank in told.ranks]
        if any(rank.error for rank in told.ranks):
            raise NotDone(*lines)
        return lines

    return action


def log_level(level: str, logger: str, timeout: float) -> Action:
    async def action(admin: admin_pb2_grpc.AdminStub) -> Sequence[str]:
        told: admin_pb2.SetLogLevelResponse = await admin.SetLogLevel(
            admin_pb2.SetLogLevelRequest(level=level, logger=logger), timeout=timeout
        )
        if told.silent_ranks:
            raise NotDone(f"ranks {', '.join(map(str, told.silent_ranks))} cannot be told")
        return [f"{logger or 'everything'} logs {level}"]

    return action
