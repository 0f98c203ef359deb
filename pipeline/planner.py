"""The plan of a microbatch: which rows it computes. Plain data, equal on every rank of an instance.

Structs, because one is made per row and tick: a frozen dataclass takes five times as long to make.
"""

from __future__ import annotations

import msgspec

from consensus.entry import Key, SamplingParams


class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """The request behind a row that yields a token; satisfies `engine.batch.Sample`."""

    params: SamplingParams
    position: int  # absolute position the sampled token will take
    forbidden: tuple[int, ...]
    prompt: tuple[int, ...]
    output: tuple[int, ...]


class Row(msgspec.Struct, frozen=True, gc=False):
    """Consecutive positions of one attempt from `start`; satisfies `engine.batch.Row`."""

    key: Key
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    sample: SampleSpec | None


class Batch(msgspec.Struct, frozen=True):
    """One microbatch: the work of tick `tick`, which occupies `slot` until its harvest."""

    tick: int
    slot: int
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class Share(msgspec.Struct, frozen=True, gc=False):
    """What the scheduler wants to give one attempt in the next batch: `count` positions from `start`."""

    key: Key
    start: int
    count: int
