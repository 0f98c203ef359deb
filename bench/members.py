"""The processes of a cluster on this machine, by what they are.

In: the cluster's run directory. Out: `Member`s: the gateway, the daemon of each instance, each rank, with process ids,
and what each has used of the processors so far. Raises `ClusterError` with a message for people.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from bench.timelines import OPTIONS, TIMEOUT, ClusterError
from paceline_proto.v1 import admin_pb2, admin_pb2_grpc
from security.channels import dial_blocking
from security.secrets import Secrets


@dataclass(frozen=True, slots=True)
class Member:
    name: str  # "gateway", "prefill-0", "prefill-0 rank 1"
    pid: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds since its start: processor time of all its threads, that of its main thread alone, and the time in which
    a thread could have run and no processor was free."""

    whole: float
    main: float
    starved: float
    resident: int  # bytes, now


def cluster_parts(run_dir: Path) -> list[dict[str, Any]]:
    try:
        parts: list[dict[str, Any]] = json.loads((run_dir / "cluster.json").read_text())["parts"]
    except FileNotFoundError:
        raise ClusterError(f"no cluster runs in {run_dir}; --run-dir is that of its `paceline up`") from None
    return parts


def members(run_dir: Path, secrets: Secrets | None = None) -> list[Member]:
    found = []
    for part in cluster_parts(run_dir):
        found.append(Member(part["name"], part["pid"]))
        if part["role"] != "gateway":
            told = _status(part["address"], secrets)
            found += [Member(f"{part['name']} rank {rank.rank}", rank.pid, rank.rank) for rank in told.ranks]
    return found


def _status(address: str, secrets: Secrets | None) -> admin_pb2.StatusResponse:
    try:
        with dial_blocking(address, secrets, OPTIONS) as channel:
            return admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=TIMEOUT)
    except grpc.RpcError as error:
        raise ClusterError(f"the instance at {address} does not answer: {error.details()}") from error


def spent(of: Sequence[Member]) -> dict[str, Spent]:
    """By name; who is gone is left out."""
    found = {}
    for member in of:
        try:
            times = psutil.Process(member.pid).cpu_times()
            resident = psutil.Process(member.pid).memory_info().rss
            main, starved = _threads(member.pid)
            found[member.name] = Spent(times.user + times.system, main, starved, resident)
        except (psutil.Error, OSError, KeyError):
            continue
    return found


def _threads(pid: int) -> tuple[float, float]:
    """Of the main thread what it ran, of all that live now what they waited for a processor."""
    counted: dict[int, list[float]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread may end meanwhile
            counted[int(task.name)] = [int(text) / 1e9 for text in (task / "schedstat").read_text().split()[:2]]
    return counted[pid][0], sum(waited for _, waited in counted.values())
