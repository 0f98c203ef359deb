"""The KV pool of these tests, and what its pages hold: known of each room on both hosts."""

from __future__ import annotations

import mmap
import os
import zlib
from dataclasses import replace

import numpy
from numpy.typing import NDArray

from tests.transfer.pools import Pool, pipeline
from transfer.io.engine import TransferEngine, make_engine

PAGES, PAGE_SIZE, LAYERS, BYTES_PER_TOKEN = 64, 64, 4, 4096
# What the next owner of a page writes into it: of source pages it must not arrive anywhere, and in
# destination pages it must stay.
NEXT_SOURCE, NEXT_DESTINATION = 0x99, 0x55

TOPOLOGY = pipeline(1, LAYERS, PAGE_SIZE, BYTES_PER_TOKEN)


class SharedPool(Pool):
    """In a shared memory file, as in production: hosts on one machine could be tempted to use it."""

    def __init__(self) -> None:
        super().__init__(TOPOLOGY, 0, PAGES)
        self.descriptor = os.memfd_create("kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.data.nbytes)
        memory = mmap.mmap(self.descriptor, self.data.nbytes)
        self.data = numpy.frombuffer(memory, dtype=numpy.uint8).reshape(self.data.shape)
        bases = tuple((int(layer[0].ctypes.data), int(layer[1].ctypes.data)) for layer in self.data)
        self.regions = replace(self.regions, bases=bases)


def start_engine(backend: str, host: str, pool: SharedPool) -> TransferEngine:
    engine = make_engine(backend, host)
    engine.register(pool.data.ctypes.data, pool.data.nbytes, pool.descriptor)
    return engine


def content(room: str, pages: int) -> NDArray[numpy.uint8]:
    """[layer, K or V, page, position, bytes]"""
    shape = (LAYERS, 2, pages, PAGE_SIZE, BYTES_PER_TOKEN // 2)
    return numpy.random.default_rng(zlib.crc32(room.encode())).integers(0, 256, shape, dtype=numpy.uint8)
