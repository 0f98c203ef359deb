"""Topologies and pools that the tests of this folder share."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from typing import Protocol

import numpy
from numpy.typing import NDArray

from transfer.plan import Shard, Topology
from transfer.regions import RegionTable

PAGE = 4
HEADS = 2
HEAD_BYTES = 16  # of one buffer
BYTES_PER_TOKEN = 2 * HEADS * HEAD_BYTES
BLANK = 0xEE  # what a pool without a seed is filled with


def pipeline(ranks: int, layers: int, page_size: int = PAGE, bytes_per_token: int = BYTES_PER_TOKEN) -> Topology:
    """`ranks` stages over `layers` layers, as even as they go."""
    cuts = [layers * rank // ranks for rank in range(ranks + 1)]
    shards = tuple(Shard(rank, (cuts[rank], cuts[rank + 1]), (0, HEADS)) for rank in range(ranks))
    return Topology.uniform(shards, page_size, bytes_per_token)


class Memory(Protocol):
    """What an engine is told of a rank's KV: one area, a mapping of a file in memory, with the regions in it."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def descriptor(self) -> int | None: ...
    @property
    def regions(self) -> RegionTable: ...


class Pool:
    """A rank's KV in numpy: [layer, K or V, page, position, bytes]."""

    def __init__(self, topology: Topology, rank: int, pages: int, seed: int | None = None) -> None:
        shard = topology.shards[rank]
        width = topology.bytes_per_token[0] // 2
        shape = (shard.layers[1] - shard.layers[0], 2, pages, topology.page_size, width)
        self.nbytes = math.prod(shape)
        self.descriptor = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.nbytes)
        mapped = numpy.frombuffer(mmap.mmap(self.descriptor, self.nbytes), dtype=numpy.uint8)
        self.data: NDArray[numpy.uint8] = mapped.reshape(shape)
        self.data[:] = BLANK
        if seed is not None:
            self.data[:] = numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8)
        self.address = int(self.data.ctypes.data)
        self.first_layer = shard.layers[0]
        self.regions = RegionTable(
            layers=shard.layers,
            heads=shard.heads,
            tokens=pages * topology.page_size,
            bytes_per_token=(width,) * len(self.data),
            bases=tuple((int(layer[0].ctypes.data), int(layer[1].ctypes.data)) for layer in self.data),
        )

    def tokens(self, layer: int, pages: list[int], count: int) -> NDArray[numpy.uint8]:
        """What these pages hold of a layer: [K or V, position, bytes]."""
        chosen = self.data[layer - self.first_layer][:, pages]
        return chosen.reshape(2, -1, chosen.shape[-1])[:, :count]
