"""A pool in shared memory: both processes of every pair map the same two, a source and a destination.

So the reference can copy into the other process's memory, the receiver can compare what came with what was
sent, and the memory needed does not grow with the number of backends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from transfer.regions import Write

POISON = 0xEE
PATTERN = (1 << 20) + 4099  # no divisor of a page: a page that lands at another's place differs


class Pool:
    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor, self.nbytes = descriptor, nbytes
        self.data: NDArray[numpy.uint8] = numpy.frombuffer(mmap.mmap(descriptor, nbytes), dtype=numpy.uint8)
        self.base = int(self.data.ctypes.data)

    @property
    def view(self) -> memoryview:
        return self.data.data

    @staticmethod
    def create(name: str, nbytes: int) -> Pool:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        return Pool(descriptor, nbytes)

    def fill(self) -> None:
        """With bytes of chance, the same in every run, that do not repeat from page to page."""
        pattern = numpy.random.default_rng(1).integers(0, 256, PATTERN, dtype=numpy.uint8)
        for at in range(0, self.nbytes, PATTERN):
            part = self.data[at : at + PATTERN]
            part[:] = pattern[: len(part)]

    def poison(self) -> None:
        self.data[:] = POISON


def wrong_writes(source: Pool, destination: Pool, writes: Sequence[Write]) -> int:
    """How many of these did not arrive as they left."""
    wrong = 0
    for src, dst, nbytes in writes:
        sent = source.data[src - source.base : src - source.base + nbytes]
        came = destination.data[dst - destination.base : dst - destination.base + nbytes]
        wrong += not numpy.array_equal(sent, came)
    return wrong
