"""The plan of a microbatch: which rows it computes. Plain data, equal on every rank of an instance."""

from __future__ import annotations

from dataclasses import dataclass

from consensus.entry import Key, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """The request behind a row that yields a token; satisfies `engine.batch.Sample`."""

    params: SamplingParams
    position: int  # absolute position the sampled token will take
    forbidden: tuple[int, ...]
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive positions of one attempt from `start`; satisfies `engine.batch.Row`."""

    key: Key
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    sample: SampleSpec | None


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch: the work of tick `tick`, which occupies `slot` until its harvest."""

    tick: int
    slot: int
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Share:
    """What the scheduler wants to give one attempt in the next batch: `count` positions from `start`."""

    key: Key
    start: int
    count: int
