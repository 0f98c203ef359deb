"""What lies in a rank's KV pool: for every (layer, page, offset) the tag of the position written there.

A tag is (attempt, position) as one number. Reading a position whose tag is another's is corruption.
The pool also counts, per page, the remote writes that may still land in it and the reads of handles
that are still on their way, so that giving such a page to anyone is seen at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from zlib import crc32

from sim.clock import Violation

POSITIONS = 1 << 12  # more than any prompt and output has
NOBODY = -2  # attempt whose content no rank may ever read


class KvPool:
    def __init__(self, owner: str, layers: tuple[int, int], pages: int, page_size: int) -> None:
        self.owner, self.page_size = owner, page_size
        self.first = layers[0]
        self.tags = [[-1] * (pages * page_size) for _ in range(*layers)]
        self.inbound = [0] * pages
        self.outbound = [0] * pages

    def write(self, pages: Sequence[int], start: int, count: int, attempt: int) -> None:
        """The forward stores the KV of [start, start + count), in every layer."""
        size, base = self.page_size, attempt * POSITIONS
        for position in range(start, start + count):
            at = pages[position // size] * size + position % size
            for layer in self.tags:
                layer[at] = base + position

    def check(self, pages: Sequence[int], end: int, attempt: int, reader: str) -> None:
        """The forward attends to every position before `end`."""
        size, base = self.page_size, attempt * POSITIONS
        for index in range(-(-end // size)):
            at, first = pages[index] * size, index * size
            count = min(size, end - first)
            expected = list(range(base + first, base + first + count))
            for number, layer in enumerate(self.tags):
                if layer[at : at + count] != expected:
                    found = [(tag // POSITIONS, tag % POSITIONS) for tag in layer[at : at + count]]
                    raise Violation(
                        f"corrupt KV: {self.owner} layer {self.first + number} page {pages[index]}: {reader} "
                        f"(attempt {attempt}) reads positions {first}.. and finds {found}"
                    )

    def land(self, source: KvPool, layers: tuple[int, int], runs: Sequence[tuple[int, int, int]]) -> None:
        """A remote write lands now, with what the source holds now."""
        for layer in range(*layers):
            out, into = source.tags[layer - source.first], self.tags[layer - self.first]
            for src, dst, count in runs:
                into[dst : dst + count] = out[src : src + count]

    def damage(self, layer: int, at: int) -> None:
        """A bit flips."""
        self.tags[layer - self.first][at] ^= 1

    def checksums(self, layers: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bytes:
        """Per layer and span, of what lies there now."""
        found = bytearray()
        for layer in range(*layers):
            tags = self.tags[layer - self.first]
            for at, count in spans:
                found += crc32(array("q", tags[at : at + count]).tobytes()).to_bytes(4, "big")
        return bytes(found)

    def save(self, pages: Sequence[int]) -> list[list[int]]:
        """A copy to host memory."""
        size = self.page_size
        return [[tag for page in pages for tag in layer[page * size : (page + 1) * size]] for layer in self.tags]

    def load(self, pages: Sequence[int], saved: list[list[int]]) -> None:
        """A copy back, into other pages perhaps."""
        size = self.page_size
        for layer, tags in zip(self.tags, saved, strict=True):
            for index, page in enumerate(pages):
                layer[page * size : (page + 1) * size] = tags[index * size : (index + 1) * size]

    def copy(self) -> KvPool:
        """What the pool holds now, for writes that were read already."""
        frozen = KvPool(self.owner, (self.first, self.first), 0, self.page_size)
        frozen.tags = [layer[:] for layer in self.tags]
        return frozen

    def pages_of(self, offsets: Iterable[tuple[int, int]]) -> list[int]:
        """Pages that (offset, count) runs touch, each once."""
        size = self.page_size
        found: dict[int, None] = {}
        for at, count in offsets:
            found.update(dict.fromkeys(range(at // size, (at + count - 1) // size + 1)))
        return list(found)

    def may_give(self, pages: Sequence[int]) -> None:
        """Invariant 3, at the moment of allocation."""
        for page in pages:
            if self.inbound[page]:
                raise Violation(f"{self.owner}: page {page} allocated while a remote write into it may land")
            if self.outbound[page]:
                raise Violation(f"{self.owner}: page {page} allocated while a handle still reads it")
