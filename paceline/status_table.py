"""Draws a status report for people. In: the report of `paceline.status`. Out: text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

HEADINGS = (
    "rank", "pid", "layers", "seq", "digest", "pages", "requests", "queues", "rooms", "store", "writes", "progress",
    "doing",
)  # fmt: skip


def render(report: dict[str, Any]) -> str:
    lines = []
    if report["gateway"]:
        lines += [f"gateway    {report['gateway']}   {report['gateway_status']}"]
    for instance in report["instances"]:
        lines += ["", *_instance(instance)]
    return "\n".join(lines).lstrip("\n")


def _instance(instance: dict[str, Any]) -> Iterable[str]:
    name = instance["instance"] or "(unknown)"
    if instance["error"]:
        error = instance["error"].replace("no answer", "NO ANSWER", 1)
        yield f"{name}   {instance['role']}   {instance['address']}   {error}"
        return
    yield (
        f"{name}   {instance['role']}   {instance['address']}   {instance['phase']}   epoch {instance['epoch']}   "
        f"{instance['model_name']}   KV by {instance['transfer_backend'] or '?'}"
    )
    if not instance["serving"] and instance["not_serving_reason"]:
        yield f"  not serving: {instance['not_serving_reason']}"
    if drain := instance["drain"]:
        left = f"{instance['open_attempts']} open, let go in {drain['remaining_s']:g} s"
        yield f"  draining: {'empty, may be stopped' if drain['empty'] else left}"
    if instance["routed"]:
        yield f"  not used by the gateway: {instance['routed']}"
    if instance["restarts"]:
        yield f"  ranks restarted {instance['restarts']}×; last: {instance['last_failure']}"
    rows = [HEADINGS, *(_rank(rank, instance["phase"]) for rank in instance["ranks"])]
    if any(rank["host"] for rank in instance["ranks"]):
        hosts = ["host", *(rank["host"] for rank in instance["ranks"])]
        rows = [(row[0], host, *row[1:]) for row, host in zip(rows, hosts, strict=True)]
    yield from aligned(rows)
    if verdict := _agreement(instance["ranks"]):
        yield f"  {verdict}"
    for rank in instance["ranks"]:
        if rank["audit"]:
            yield f"  rank {rank['rank']} PAGE AUDIT FAILED: {rank['audit']}"
        if any(rank["counters"].values()):
            yield f"  rank {rank['rank']} counted: {counted(rank['counters'])}"


def _agreement(ranks: list[dict[str, Any]]) -> str:
    """Ranks at the same entry must have the same digest; those still a few entries behind prove nothing."""
    digests: dict[int, set[str]] = {}
    for rank in ranks:
        if rank["answered"]:
            digests.setdefault(rank["applied_seq"], set()).add(rank["digest"])
    if any(len(found) > 1 for found in digests.values()):
        return "RANKS DISAGREE: same entry, different digests"
    return "all ranks agree" if len(digests) == 1 and len(ranks) == sum(r["answered"] for r in ranks) > 1 else ""


def _rank(rank: dict[str, Any], phase: str) -> tuple[str, ...]:
    begin, end = rank["layers"]
    silent = phase if phase in ("loading", "restarting") else "NO ANSWER"  # those two cannot answer yet
    return (
        str(rank["rank"]),
        str(rank["pid"]) if rank["answered"] else f"{rank['pid']} {silent}",
        f"{begin}–{end - 1}" if end > begin else "-",
        str(rank["applied_seq"]),
        rank["digest"][:8] or "-",
        counted(rank["pages"]),
        counted(rank["requests"]),
        counted(rank["queues"]),
        str(rank["rooms"]),
        str(rank["store_entries"]),
        str(rank["transfer_handles"]),
        f"{rank['last_progress_s']:.1f} s ago" if rank["answered"] else "-",
        rank["executing"] or "-",
    )


def counted(numbers: dict[str, int]) -> str:
    """`{"free": 60, "owned": 4, "cached": 0}` → `free 60, owned 4`."""
    return ", ".join(f"{name} {number}" for name, number in numbers.items() if number) or "-"


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield ("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))).rstrip()
