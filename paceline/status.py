"""Asks every instance about itself and its ranks, and shows what they say.

In: addresses, or the record of a local cluster. Out: a table or JSON; exit code 1 if an instance does
not answer. The keys of the JSON are relied upon by tests and scripts: they are only ever added to.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc.aio

from paceline.asked import ROLES, Asked, Known
from paceline.health import CHANNEL_OPTIONS, GatewayProbe
from paceline.silence import why_silent
from paceline.status_table import render
from paceline_proto.v1 import admin_pb2, admin_pb2_grpc, bootstrap_pb2, bootstrap_pb2_grpc
from security.channels import dial


async def status(asked: Asked, as_json: bool) -> int:
    report = await collect(asked)
    print(json.dumps(report, indent=2) if as_json else render(report))
    return 1 if any(instance["error"] for instance in report["instances"]) else 0


async def collect(asked: Asked) -> dict[str, Any]:
    """All questions at once, once it is known whom to ask; each has `asked.timeout` seconds."""
    known = await asked.known()
    gateway, *instances = await asyncio.gather(
        ask_gateway(asked.url, asked.timeout), *(ask_instance(asked, one) for one in known)
    )
    return {"gateway": asked.url, "gateway_status": gateway, "instances": instances}


async def ask_gateway(url: str | None, timeout: float) -> str | None:
    if url is None:
        return None
    probe = GatewayProbe(url)
    try:
        return (await asyncio.wait_for(probe(), timeout)).text
    except Exception:
        return "no answer"
    finally:
        await probe.close()


async def ask_instance(asked: Asked, known: Known) -> dict[str, Any]:
    """What one instance says, or the same keys with its `error`."""
    described, told, error = bootstrap_pb2.DescribeResponse(), admin_pb2.StatusResponse(), ""
    async with dial(known.address, asked.secrets, CHANNEL_OPTIONS) as channel:
        try:
            described, told = await asyncio.gather(
                bootstrap_pb2_grpc.BootstrapStub(channel).Describe(
                    bootstrap_pb2.DescribeRequest(), timeout=asked.timeout
                ),
                admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=asked.timeout),
            )
        except grpc.aio.AioRpcError as failure:
            error = why_silent(failure, known.address)
    return instance_report(known, described, told, error)


def instance_report(
    known: Known,
    described: bootstrap_pb2.DescribeResponse,
    told: admin_pb2.StatusResponse,
    error: str,
) -> dict[str, Any]:
    return {
        "instance": told.instance.instance_id or known.name,
        "role": ROLES.get(told.role, known.role),
        "address": known.address,
        "error": error,
        "epoch": told.instance.epoch,
        "phase": told.phase,
        "open_attempts": told.open_attempts,
        "drain": drain_report(told.drain) if told.HasField("drain") else None,
        "pid": told.pid,
        "restarts": told.restarts,
        "last_failure": told.last_failure,
        "serving": described.serving,
        "not_serving_reason": described.not_serving_reason,
        "model_name": described.model_name,
        "page_size": described.page_size,
        "pool_pages": described.pages,
        "kv_dtype": described.kv_dtype,
        "transfer_backend": described.transfer_backend,
        "routed": known.routed,
        "ranks": [rank_report(rank) for rank in sorted(told.ranks, key=lambda rank: rank.rank)],
    }


def drain_report(drain: admin_pb2.DrainState) -> dict[str, Any]:
    return {"reason": drain.reason, "remaining_s": round(drain.remaining_s, 1), "empty": drain.empty}


def rank_report(rank: admin_pb2.RankStatus) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "pid": rank.pid,
        "answered": rank.answered,
        "layers": [rank.layer_begin, rank.layer_end],
        "epoch": rank.epoch,
        "applied_seq": rank.applied_seq,
        "digest": rank.digest,
        "queues": dict(sorted(rank.queues.items())),
        "requests": dict(sorted(rank.requests.items())),
        "pages": dict(sorted(rank.pages.items())),
        "rooms": rank.rooms,
        "store_entries": rank.store_entries,
        "transfer_handles": rank.transfer_handles,
        "last_progress_s": round(rank.last_progress_s, 3),
        "counters": dict(sorted(rank.counters.items())),
        "executing": rank.executing,
        "audit": rank.audit,
        "host": rank.host,
    }
