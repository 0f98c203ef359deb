"""The paged KV cache of one stage: one region of K and one of V for each of its layers.

In: the geometry. Out: tensors `[pages, page_size, kv_heads, head_dim]` to write and gather, and
`Region`s (addresses) for the transfer engine.

Invariants: all regions lie in one allocation, so it can be registered at once; each region is
contiguous and starts on a 4 KiB boundary; a run of pages within a region is one byte range; the
memory never moves, and it starts zeroed; a shared pool is a file in memory, mapped from its first byte
on. Which page belongs to whom is not this module's business.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Literal

import torch

log = logging.getLogger(__name__)

ALIGNMENT = 4096  # bytes
Kind = Literal["k", "v"]


@dataclass(frozen=True, slots=True)
class Region:
    """The K or V memory of one layer. Page p is at `address + p * page_size * bytes_per_token`."""

    layer: int  # global layer id
    kind: Kind
    address: int
    nbytes: int
    bytes_per_token: int


class KVPool:
    """KV pages of layers `layers` (global ids)."""

    def __init__(
        self,
        layers: range,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        shared: bool = False,
    ) -> None:
        """`shared`: other processes that are given `descriptor` can map it, where the system allows that. Raises
        `ValueError` for a geometry without a page, token or layer."""
        if min(len(layers), pages, page_size, kv_heads, head_dim) < 1:
            raise ValueError(
                f"a KV pool needs at least one of everything; asked were {len(layers)} layers, {pages} pages of "
                f"{page_size} tokens, {kv_heads} heads of {head_dim}"
            )
        self.layers, self.pages, self.page_size = layers, pages, page_size
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.bytes_per_token = kv_heads * head_dim * dtype.itemsize  # of one region
        self.bytes_per_page = 2 * len(layers) * page_size * self.bytes_per_token  # of all regions together
        stride = _region_stride(pages, page_size, self.bytes_per_token)
        self.nbytes = 2 * len(layers) * stride
        self.descriptor: int | None = None  # of the file behind `memory`, if it is shared
        if shared:
            self.descriptor = _file_in_memory(self.nbytes)
        if self.descriptor is not None:
            weakref.finalize(self, os.close, self.descriptor)
            allocation = torch.frombuffer(mmap.mmap(self.descriptor, self.nbytes), dtype=torch.uint8)
        else:
            allocation = torch.zeros(self.nbytes + ALIGNMENT, dtype=torch.uint8)
        start = -allocation.data_ptr() % ALIGNMENT
        self.memory = allocation[start : start + self.nbytes]  # uint8 view of everything that is registered
        shape = (pages, page_size, kv_heads, head_dim)
        size = pages * page_size * self.bytes_per_token
        self._tensors: dict[tuple[int, Kind], torch.Tensor] = {}
        offset = 0
        for layer in layers:
            kinds: tuple[Kind, Kind] = ("k", "v")
            for kind in kinds:
                self._tensors[layer, kind] = self.memory[offset : offset + size].view(dtype).view(shape)
                offset += stride
        assert offset == self.nbytes

    @property
    def base_address(self) -> int:
        """Address of the whole pool; `nbytes` from here cover every region."""
        return self.memory.data_ptr()

    def keys(self, layer: int) -> torch.Tensor:
        """K of global layer `layer`, `[pages, page_size, kv_heads, head_dim]`, a view."""
        return self._tensors[layer, "k"]

    def values(self, layer: int) -> torch.Tensor:
        """V of global layer `layer`, `[pages, page_size, kv_heads, head_dim]`, a view."""
        return self._tensors[layer, "v"]

    def regions(self) -> list[Region]:
        """Every region, layers ascending, K before V."""
        return [
            Region(layer, kind, tensor.data_ptr(), tensor.nbytes, self.bytes_per_token)
            for (layer, kind), tensor in self._tensors.items()
        ]


def _file_in_memory(nbytes: int) -> int | None:
    """Its descriptor. None where limits (`ulimit -f`, descriptors) or a sandbox are in the way: a pool that
    cannot be shared still serves, its KV comes over sockets."""
    try:
        descriptor = os.memfd_create("kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        log.warning("the KV pool of %d bytes is not shared with processes of this host: %s", nbytes, error)
        return None
    return descriptor


def pool_bytes(layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that a pool of this geometry registers."""
    return 2 * layers * _region_stride(pages, page_size, kv_heads * head_dim * dtype.itemsize)


def pages_that_fit(budget: int, layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """The largest number of pages whose pool takes at most `budget` bytes; 0 if none does."""
    per_region = budget // (2 * layers) // ALIGNMENT * ALIGNMENT
    return max(0, per_region) // (page_size * kv_heads * head_dim * dtype.itemsize)


def _region_stride(pages: int, page_size: int, bytes_per_token: int) -> int:
    return -(-pages * page_size * bytes_per_token // ALIGNMENT) * ALIGNMENT
