"""May these two ranks exchange KV?

In: what each side says of itself. Out: None, or the reason for refusing, with both values.
"""

from __future__ import annotations

from .messages import Hello, Terms
from .plan import PlanError, Topology, TransferPlan
from .regions import RegionTable


def loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("localhost", "::1")


def unspecified(host: str) -> bool:
    return host in ("", "*", "0.0.0.0", "::")


def misfit(regions: RegionTable, topology: Topology, rank: int) -> str | None:
    """Why this region table cannot be that rank's."""
    if rank >= len(topology.shards):
        return f"rank {rank} of {len(topology.shards)}"
    shard = topology.shards[rank]
    if (regions.layers, regions.heads) != (shard.layers, shard.heads):
        return f"regions for layers {regions.layers} heads {regions.heads}, shard {shard.layers} {shard.heads}"
    for layer in range(*shard.layers):
        stored, needed = regions.head_bytes(layer) * len(regions.buffers(layer)), topology.bytes_per_token[layer]
        if stored * topology.head_count != needed:
            return f"layer {layer}: regions of {stored} bytes per head, topology of {needed} per {topology.head_count}"
    if regions.tokens % topology.page_size:
        return f"{regions.tokens} positions are no whole pages of {topology.page_size}"
    return None


def objection(hello: Hello, sender_rank: int, terms: Terms, topology: Topology, host: str) -> str | None:
    """Why the prefill rank with these terms must refuse this decode rank, or None."""
    for what in ("version", "model", "kv_dtype", "cache", "backend", "checksum"):
        mine, theirs = getattr(terms, what), getattr(hello.terms, what)
        if mine != theirs:
            return f"{what}: {mine!r} here, {theirs!r} there"
    try:
        TransferPlan(topology, hello.topology)
    except PlanError as error:
        return str(error)
    if (reason := misfit(hello.regions, hello.topology, sender_rank)) is not None:
        return reason
    if unspecified(hello.host) or loopback(hello.host) != loopback(host):
        return f"address: {host} here, {hello.host} there; one cannot reach the other"
    return None
