"""A live view of a cluster in the terminal, once a second, or once.

In: the status of every instance, twice, and the gateway's and instances' own metrics. Out: text. Rates are the
differences of two looks; the first look has none.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from paceline.config import Cluster, cluster_secrets, read_cluster
from paceline.status import collect
from paceline.status_table import aligned, counted
from paceline.top_figures import Look, gateway_lines, rank_rows, read_metrics
from security.secrets import Secrets

EVERY_S = 1.0
_CLEAR = "\x1b[H\x1b[J"


async def top(run_dir: Path, addresses: list[str] | None, timeout: float, once: bool, secrets_folder: str = "") -> int:
    secrets = cluster_secrets(secrets_folder)
    cluster = None if addresses else read_cluster(run_dir)
    if cluster is None and not addresses:
        raise SystemExit(
            f"paceline: no cluster runs in {run_dir.absolute()}; start one with `paceline up`, name its --run-dir, "
            "or name instances with --address"
        )
    before = None
    while True:
        began = time.monotonic()
        now = await look(cluster, addresses or [], timeout, secrets)
        if before is not None or once is False:
            sys.stdout.write((("" if once else _CLEAR) + render(before, now)) + "\n")
            sys.stdout.flush()
        if once and before is not None:
            return 1 if any(instance["error"] for instance in now.report["instances"]) else 0
        before = now
        await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))


async def look(cluster: Cluster | None, addresses: list[str], timeout: float, secrets: Secrets | None) -> Look:
    url = f"{cluster.url}/metrics" if cluster else None
    report, metrics = await asyncio.gather(collect(cluster, addresses, timeout, secrets), read_metrics(url, timeout))
    return Look(time.monotonic(), report, metrics)


def render(before: Look | None, now: Look) -> str:
    lines = gateway_lines(before, now)
    for instance in now.report["instances"]:
        lines += ["", *_instance(before, now, instance)]
    return "\n".join(lines).lstrip("\n")


def _instance(before: Look | None, now: Look, instance: dict[str, Any]) -> list[str]:
    name = instance["instance"] or instance["address"]
    if instance["error"]:
        return [f"{name}   {instance['role']}   {instance['error'].upper()}"]
    head = f"{name}   {instance['role']}   {instance['phase']}   epoch {instance['epoch']}"
    if instance["restarts"]:
        head += f"   restarted {instance['restarts']}×"
    first = instance["ranks"][0] if instance["ranks"] else None
    requests = counted(first["requests"]) if first else "-"
    return [f"{head}   requests: {requests}", *aligned(rank_rows(before, now, instance))]
