"""Where a rank's KV lies, and the addresses a write needs.

In: two region tables (ours, and the peer's from its handshake) and runs of tokens.
Out: (source address, destination address, bytes) per layer and buffer.
Invariant: nothing outside either table is ever returned. A library's own check is
not enough: one of them kills the target on a bad address, another only counts on
the target's registration, so the bounds are checked here before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .extents import Extent

Write = tuple[int, int, int]  # source address, destination address, bytes


class RegionError(ValueError):
    """A write that would leave a pool, or a table that cannot be one."""


@dataclass(frozen=True, slots=True)
class RegionTable:
    """One rank's pool: per layer one buffer for K and one for V (or a single one).

    A buffer is `[tokens, heads, head bytes]`, dense; `tokens` counts all its pages' positions.
    """

    layers: tuple[int, int]
    heads: tuple[int, int]
    tokens: int
    bytes_per_token: int  # of one buffer: all heads this rank holds
    bases: tuple[tuple[int, ...], ...]  # bases[layer - layers[0]][0 for K, 1 for V]

    def __post_init__(self) -> None:
        heads = self.heads[1] - self.heads[0]
        if len(self.bases) != self.layers[1] - self.layers[0] or heads < 1 or self.tokens < 1:
            raise RegionError("a region table needs bases for each of its layers, heads and tokens")
        if self.bytes_per_token < 1 or self.bytes_per_token % heads:
            raise RegionError(f"{self.bytes_per_token} bytes do not divide into {heads} heads")
        if any(len(bases) != len(self.bases[0]) for bases in self.bases) or not 1 <= len(self.bases[0]) <= 2:
            raise RegionError("every layer has the same one or two buffers")
        top = (1 << 64) - self.nbytes
        if any(not 0 < base <= top for bases in self.bases for base in bases):
            raise RegionError("a base address lies outside the address space")

    @property
    def nbytes(self) -> int:
        """Size of one buffer."""
        return self.tokens * self.bytes_per_token

    @property
    def head_bytes(self) -> int:
        return self.bytes_per_token // (self.heads[1] - self.heads[0])


def resolve(
    source: RegionTable,
    destination: RegionTable,
    layers: tuple[int, int],
    heads: tuple[int, int],
    runs: Sequence[Extent],
) -> list[Write]:
    """The writes that copy `runs` of these layers and heads. Raises `RegionError` rather than leave a pool."""
    for side, table in (("source", source), ("destination", destination)):
        if not (table.layers[0] <= layers[0] < layers[1] <= table.layers[1]):
            raise RegionError(f"layers {layers} are not in the {side}'s {table.layers}")
        if not (table.heads[0] <= heads[0] < heads[1] <= table.heads[1]):
            raise RegionError(f"heads {heads} are not in the {side}'s {table.heads}")
    if source.head_bytes != destination.head_bytes or len(source.bases[0]) != len(destination.bases[0]):
        raise RegionError("the two pools do not store a head in the same way")
    for src, dst, tokens in runs:
        if tokens < 1 or not 0 <= src <= source.tokens - tokens:
            raise RegionError(f"{tokens} tokens at {src} leave the source's {source.tokens}")
        if not 0 <= dst <= destination.tokens - tokens:
            raise RegionError(f"{tokens} tokens at {dst} leave the destination's {destination.tokens}")
    whole = source.heads == heads == destination.heads
    if not whole:  # a head range is contiguous only inside one token
        runs = [(src + i, dst + i, 1) for src, dst, tokens in runs for i in range(tokens)]
    width = (heads[1] - heads[0]) * source.head_bytes
    src_skip = (heads[0] - source.heads[0]) * source.head_bytes
    dst_skip = (heads[0] - destination.heads[0]) * destination.head_bytes
    writes = []
    for layer in range(*layers):
        buffers = zip(
            source.bases[layer - source.layers[0]], destination.bases[layer - destination.layers[0]], strict=True
        )
        for src_base, dst_base in buffers:
            for src, dst, tokens in runs:
                src_address = src_base + src * source.bytes_per_token + src_skip
                dst_address = dst_base + dst * destination.bytes_per_token + dst_skip
                writes.append((src_address, dst_address, tokens * width))
    return writes
