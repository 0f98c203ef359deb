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
    bytes_per_token: tuple[int, ...]  # per layer, of one buffer: all heads this rank holds
    bases: tuple[tuple[int, ...], ...]  # bases[layer - layers[0]][0 for K, 1 for V]

    def __post_init__(self) -> None:
        count, heads = self.layers[1] - self.layers[0], self.heads[1] - self.heads[0]
        if not len(self.bases) == len(self.bytes_per_token) == count or heads < 1 or self.tokens < 1:
            raise RegionError("a region table needs bases and bytes for each of its layers, heads and tokens")
        for width in self.bytes_per_token:
            if width < 1 or width % heads:
                raise RegionError(f"{width} bytes do not divide into {heads} heads")
        if any(not 1 <= len(bases) <= 2 for bases in self.bases):
            raise RegionError("every layer has one or two buffers")
        for width, bases in zip(self.bytes_per_token, self.bases, strict=True):
            if any(not 0 < base <= (1 << 64) - self.tokens * width for base in bases):
                raise RegionError("a base address lies outside the address space")

    def buffers(self, layer: int) -> tuple[int, ...]:
        """Their addresses."""
        return self.bases[layer - self.layers[0]]

    def width(self, layer: int) -> int:
        """Bytes of a position in one buffer."""
        return self.bytes_per_token[layer - self.layers[0]]

    def nbytes(self, layer: int) -> int:
        """Size of one buffer."""
        return self.tokens * self.width(layer)

    def head_bytes(self, layer: int) -> int:
        return self.width(layer) // (self.heads[1] - self.heads[0])


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
    for src, dst, tokens in runs:
        if tokens < 1 or not 0 <= src <= source.tokens - tokens:
            raise RegionError(f"{tokens} tokens at {src} leave the source's {source.tokens}")
        if not 0 <= dst <= destination.tokens - tokens:
            raise RegionError(f"{tokens} tokens at {dst} leave the destination's {destination.tokens}")
    whole = source.heads == heads == destination.heads
    if not whole:  # a head range is contiguous only inside one token
        runs = [(src + i, dst + i, 1) for src, dst, tokens in runs for i in range(tokens)]
    writes = []
    for layer in range(*layers):
        head_bytes = source.head_bytes(layer)
        sources, destinations = source.buffers(layer), destination.buffers(layer)
        if head_bytes != destination.head_bytes(layer) or len(sources) != len(destinations):
            raise RegionError(f"the two pools do not store a head of layer {layer} in the same way")
        width = (heads[1] - heads[0]) * head_bytes
        src_skip = (heads[0] - source.heads[0]) * head_bytes
        dst_skip = (heads[0] - destination.heads[0]) * head_bytes
        src_width, dst_width = source.width(layer), destination.width(layer)
        for src_base, dst_base in zip(sources, destinations, strict=True):
            for src, dst, tokens in runs:
                src_address = src_base + src * src_width + src_skip
                dst_address = dst_base + dst * dst_width + dst_skip
                writes.append((src_address, dst_address, tokens * width))
    return writes
