"""What is kept of each request, and its file: one JSON object a line.

All moments are seconds from the start of the run, on one clock. `scheduled` is when the load shape says that the
request comes, `sent` when it was handed to the connection; in a closed loop it is scheduled when its user is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    scheduled: float
    sent: float
    ended: float
    chunks: tuple[tuple[float, int], ...] = ()  # (moment, tokens) of each event that brought tokens
    prompt_tokens: int | None = None  # as the server says
    output_tokens: int = 0  # as the server says, or counted
    asked_tokens: int
    finish_reason: str = ""
    error: str = ""  # kind of failure; empty: the answer is whole
    reason: str = ""  # of the failure, for people

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float | None:
        return self.chunks[0][0] - self.scheduled if self.chunks else None

    @property
    def latency(self) -> float:
        """End to end, to the last token; what has no token, to its end."""
        return (self.chunks[-1][0] if self.chunks else self.ended) - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Per token after the first; None if there is none."""
        if self.output_tokens < 2 or not self.chunks:
            return None
        return (self.chunks[-1][0] - self.chunks[0][0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between each token and the one before it; tokens of one event came together, 0 apart."""
        found = [0.0] * (self.chunks[0][1] - 1) if self.chunks else []
        for (before, _), (at, tokens) in zip(self.chunks, self.chunks[1:], strict=False):
            found += [at - before, *[0.0] * (tokens - 1)]
        return found


def write_records(path: Path, records: Iterable[Record]) -> None:
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for record in records:
            file.write(encode(record) + b"\n")


def read_records(path: Path) -> list[Record]:
    decode = msgspec.json.Decoder(Record).decode
    return [decode(line) for line in path.read_bytes().splitlines()]
