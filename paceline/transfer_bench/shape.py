"""The KV that is moved: how large, in which pages.

In: the command's options. Out: topology and region tables as the product's ranks have them, and the writes that
move a prompt. Invariant: all ways of moving a prompt are measured on the same writes.
"""

from __future__ import annotations

import msgspec

from transfer.extents import extents
from transfer.plan import Shard, Topology
from transfer.regions import RegionTable, Write, resolve


class Shape(msgspec.Struct, frozen=True):
    layers: int
    heads: int
    dim: int
    dtype_bytes: int
    page_size: int
    fragmented: bool
    tokens: int  # of the longest prompt: what a pool holds

    @property
    def pages(self) -> int:
        return -(-self.tokens // self.page_size)

    @property
    def bytes_per_token(self) -> int:
        """Of one buffer: a layer's K or V."""
        return self.heads * self.dim * self.dtype_bytes

    @property
    def buffer_bytes(self) -> int:
        return self.pages * self.page_size * self.bytes_per_token

    @property
    def pool_bytes(self) -> int:
        return 2 * self.layers * self.buffer_bytes

    def prompt_bytes(self, tokens: int) -> int:
        return 2 * self.layers * tokens * self.bytes_per_token

    def topology(self) -> Topology:
        """Raises `PlanError` for a shape that no rank could have."""
        shard = Shard(0, (0, self.layers), (0, self.heads))
        return Topology.uniform((shard,), self.page_size, 2 * self.bytes_per_token)

    def regions(self, base: int) -> RegionTable:
        starts = [base + index * self.buffer_bytes for index in range(2 * self.layers)]
        return RegionTable(
            layers=(0, self.layers),
            heads=(0, self.heads),
            tokens=self.pages * self.page_size,
            bytes_per_token=(self.bytes_per_token,) * self.layers,
            bases=tuple(zip(starts[::2], starts[1::2], strict=True)),
        )

    def source_pages(self, tokens: int) -> list[int]:
        return list(range(-(-tokens // self.page_size)))

    def destination_pages(self, tokens: int) -> list[int]:
        pages = self.source_pages(tokens)
        # Every other page, odd ones first: no page follows its predecessor, not even where the two halves meet.
        return pages[1::2] + pages[::2] if self.fragmented else pages

    def writes(self, source: int, destination: int, tokens: int) -> list[Write]:
        """Between pools at these addresses, the whole prompt at once."""
        runs = extents(self.source_pages(tokens), self.destination_pages(tokens), 0, tokens, self.page_size)
        return resolve(self.regions(source), self.regions(destination), (0, self.layers), (0, self.heads), runs)
