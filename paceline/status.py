"""Asks every instance about itself and its ranks, and shows what they say.

In: addresses, or the record of a local cluster. Out: a table or JSON; exit code 1 if an instance does
not answer. The keys of the JSON are relied upon by tests and scripts: they are only ever added to.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from paceline.config import Cluster, read_cluster
from paceline.health import CHANNEL_OPTIONS, GatewayProbe
from paceline.status_table import render
from paceline_proto.v1 import admin_pb2, admin_pb2_grpc, bootstrap_pb2, bootstrap_pb2_grpc, common_pb2

ROLES = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_DECODE: "decode"}


async def status(run_dir: Path, addresses: list[str] | None, timeout: float, as_json: bool) -> int:
    cluster = None if addresses else read_cluster(run_dir)
    if cluster is None and not addresses:
        raise SystemExit(
            f"paceline: no cluster runs in {run_dir.absolute()}; start one with `paceline up`, name its --run-dir, "
            "or name instances with --address"
        )
    report = await collect(cluster, addresses or [], timeout)
    print(json.dumps(report, indent=2) if as_json else render(report))
    return 1 if any(instance["error"] for instance in report["instances"]) else 0


async def collect(cluster: Cluster | None, addresses: list[str], timeout: float) -> dict[str, Any]:
    """All questions at once; each has `timeout` seconds."""
    known = [(part.name, part.role, part.address) for part in cluster.instances] if cluster else []
    known += [("", "", address) for address in addresses]
    gateway, *instances = await asyncio.gather(
        ask_gateway(cluster.url if cluster else None, timeout),
        *(ask_instance(*who, timeout) for who in known),
    )
    return {"gateway": cluster.url if cluster else None, "gateway_status": gateway, "instances": instances}


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


async def ask_instance(name: str, role: str, address: str, timeout: float) -> dict[str, Any]:
    """What one instance says, or the same keys with its `error`."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            described, told = await asyncio.gather(
                bootstrap_pb2_grpc.BootstrapStub(channel).Describe(bootstrap_pb2.DescribeRequest(), timeout=timeout),
                admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=timeout),
            )
        except grpc.aio.AioRpcError as error:
            silent = error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            reason = "no answer" if silent else f"{error.code().name}: {error.details()}"
            return instance_report(
                name, role, address, bootstrap_pb2.DescribeResponse(), admin_pb2.StatusResponse(), reason
            )
    return instance_report(name, role, address, described, told, "")


def instance_report(
    name: str,
    role: str,
    address: str,
    described: bootstrap_pb2.DescribeResponse,
    told: admin_pb2.StatusResponse,
    error: str,
) -> dict[str, Any]:
    return {
        "instance": told.instance.instance_id or name,
        "role": ROLES.get(told.role, role),
        "address": address,
        "error": error,
        "epoch": told.instance.epoch,
        "phase": told.phase,
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
        "ranks": [rank_report(rank) for rank in sorted(told.ranks, key=lambda rank: rank.rank)],
    }


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
