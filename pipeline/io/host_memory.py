"""KV that was moved out of the pool: copies of pages in host memory, bounded.

Used by the executor thread alone, between batches, so a copy sees exactly the KV that the log's order
promises. What is kept is keyed by room, for an attempt is retracted at most once at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Pool(Protocol):
    """`engine.kv_pool.KVPool`."""

    layers: range
    bytes_per_page: int

    def keys(self, layer: int) -> torch.Tensor: ...
    def values(self, layer: int) -> torch.Tensor: ...


class HostMemory:
    """At most `limit` bytes of saved pages of `pool`."""

    def __init__(self, pool: Pool, limit: int) -> None:
        self._pool, self._limit = pool, limit
        self._saved: dict[str, list[torch.Tensor]] = {}
        self.used = 0

    def save(self, room: str, pages: Sequence[int]) -> None:
        """Raises `MemoryError` when the limit would be passed; then nothing is kept."""
        size = len(pages) * self._pool.bytes_per_page
        if self.used + size > self._limit:
            raise MemoryError(f"host memory is full: {self.used} of {self._limit} bytes in use, {size} needed")
        index = torch.tensor(pages)
        self._saved[room] = [region.index_select(0, index) for region in self._regions()]
        self.used += size

    def load(self, room: str, pages: Sequence[int]) -> None:
        """Puts the saved pages into these ones, in order, and forgets the copy. Raises `KeyError`."""
        index = torch.tensor(pages)
        for region, saved in zip(self._regions(), self._saved[room], strict=True):
            region.index_copy_(0, index, saved)
        self.drop(room)

    def drop(self, room: str) -> None:
        """Forgets a copy; a room without one is no error (its copy failed)."""
        saved = self._saved.pop(room, None)
        if saved is not None:
            self.used -= len(saved[0]) * self._pool.bytes_per_page

    def _regions(self) -> list[torch.Tensor]:
        return [half(layer) for layer in self._pool.layers for half in (self._pool.keys, self._pool.values)]
