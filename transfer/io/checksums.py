"""Checksums of KV, off the rank's loop: one thread that hashes what lies in the pool.

In: jobs, each a slice's layers, heads and spans. Out: their checksums through an eventfd, in the order of the
jobs. One checksum per layer and page: xxh3-64 over the page's K and then its V, of the slice's positions and
heads, big endian; so the two sides agree however they are split into stages and wherever their pages lie.

The thread reads memory that the transfer may still write; what that gives is a wrong checksum, of a room that
has ended by then. It sleeps while there is nothing to do.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
from collections.abc import Hashable, Sequence

import xxhash

from ..extents import Span
from ..regions import RegionTable

log = logging.getLogger(__name__)

NONE = "none"  # the name of doing without them
CLOSE_TIMEOUT = 5.0


class Checksums:
    """At most as many jobs wait as the two sides have slices in flight, and those are bounded."""

    def __init__(self, regions: RegionTable) -> None:
        self._regions = regions
        self._buffers = {
            layer: [
                memoryview((ctypes.c_ubyte * regions.nbytes(layer)).from_address(base)).cast("B")
                for base in regions.buffers(layer)
            ]
            for layer in range(*regions.layers)
        }
        self._jobs: queue.SimpleQueue[tuple[Hashable, tuple[int, int], tuple[int, int], Sequence[Span]] | None]
        self._jobs = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Hashable, bytes]] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="checksums", daemon=True)
        self._thread.start()

    def ask(self, key: Hashable, layers: tuple[int, int], heads: tuple[int, int], spans: Sequence[Span]) -> None:
        """`(key, checksums)` will be among the results. The spans must lie in the pool."""
        self._jobs.put((key, layers, heads, spans))

    def results(self) -> list[tuple[Hashable, bytes]]:
        """Those since the last call; clears the eventfd."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        found = []
        while not self._results.empty():
            found.append(self._results.get_nowait())
        return found

    def close(self) -> None:
        """Bounded: what is still to be hashed is not waited for."""
        self._closing.set()
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            log.error("the checksums' thread did not end within %.0f s", CLOSE_TIMEOUT)
        else:
            os.close(self.fd)

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing.is_set():
            key, layers, heads, spans = job
            try:
                checksums = self._hash(layers, heads, spans)
            except Exception:  # none that match: the slice counts as damaged, and nobody waits for it
                log.exception("cannot hash layers %s", layers)
                checksums = b""
            self._results.put((key, checksums))
            os.eventfd_write(self.fd, 1)

    def _hash(self, layers: tuple[int, int], heads: tuple[int, int], spans: Sequence[Span]) -> bytes:
        if heads != self._regions.heads:
            return self._hash_heads(layers, heads, spans)
        found = bytearray()
        for layer in range(*layers):
            width = self._regions.width(layer)
            first, *others = self._buffers[layer]
            for at, tokens in spans:
                begin, end = at * width, (at + tokens) * width
                page = xxhash.xxh3_64(first[begin:end])
                for buffer in others:
                    page.update(buffer[begin:end])
                found += page.digest()
        return bytes(found)

    def _hash_heads(self, layers: tuple[int, int], heads: tuple[int, int], spans: Sequence[Span]) -> bytes:
        """A range of heads is contiguous only inside one token."""
        found = bytearray()
        for layer in range(*layers):
            width, head_bytes = self._regions.width(layer), self._regions.head_bytes(layer)
            skip, size = (heads[0] - self._regions.heads[0]) * head_bytes, (heads[1] - heads[0]) * head_bytes
            for at, tokens in spans:
                page = xxhash.xxh3_64()
                for buffer in self._buffers[layer]:
                    for token in range(at, at + tokens):
                        page.update(buffer[token * width + skip : token * width + skip + size])
                found += page.digest()
        return bytes(found)
