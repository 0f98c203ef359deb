"""A live view of a cluster in the terminal, once a second, or once.

In: the status of every instance, twice, and the gateway's and instances' own metrics. Out: text. Rates are the
differences of two looks; the first look has none.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from paceline.asked import Asked
from paceline.status import collect
from paceline.status_table import aligned, counted
from paceline.top_figures import Look, gateway_lines, rank_rows, read_metrics

EVERY_S = 1.0
_CLEAR = "\x1b[H\x1b[J"


async def top(asked: Asked, once: bool) -> int:
    before = None
    while True:
        began = time.monotonic()
        now = await look(asked)
        if before is not None or once is False:
            sys.stdout.write((("" if once else _CLEAR) + render(before, now)) + "\n")
            sys.stdout.flush()
        if once and before is not None:
            return 1 if any(instance["error"] for instance in now.report["instances"]) else 0
        before = now
        await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))


async def look(asked: Asked) -> Look:
    url = f"{asked.url}/metrics" if asked.url else None
    report, metrics = await asyncio.gather(collect(asked), read_metrics(url, asked.timeout))
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
