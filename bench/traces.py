"""Recorded loads: when requests came, how long they were, and which prefixes they shared.

In: a Mooncake trace (JSON lines with `timestamp` in ms, `input_length`, `output_length` and `hash_ids`, one id for
each block of 512 tokens) or an Azure one (CSV with TIMESTAMP, ContextTokens, GeneratedTokens). Out: rows in
order of time, the first at 0. A hash id becomes a stream of tokens, so that requests that shared
blocks in the recording share the same blocks of tokens here. Raises `TraceError` on what it cannot read.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bench.workload import Ask, Recipe, Segment, length

BLOCK = 512  # tokens of a hash id
_DIGITS = 26  # of a timestamp, as datetime reads it; Azure's have one more


class TraceError(Exception):
    """The file is no trace; the message says where and why."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    seconds: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]  # empty: nothing is known of prefixes


@dataclass(frozen=True, slots=True)
class Scale:
    """How a recording is fitted to what replays it: factors of lengths and of time."""

    inputs: float = 1.0
    outputs: float = 1.0
    time: float = 1.0  # 2 is half as fast
    most_input: int | None = None  # longer requests are left out, after scaling
    most_output: int | None = None  # longer answers are cut


def read_trace(path: Path) -> list[TraceRow]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    reader = _azure if lines and "," in lines[0] and not lines[0].startswith("{") else _mooncake
    rows = list(reader(path, lines))
    if not rows:
        raise TraceError(f"{path} holds no requests")
    rows.sort(key=lambda row: row.seconds)
    begin = rows[0].seconds
    return [TraceRow(row.seconds - begin, row.input_tokens, row.output_tokens, row.hash_ids) for row in rows]


def replay(rows: Iterable[TraceRow], scale: Scale) -> list[tuple[float, Ask]]:
    """(seconds, request) of each row that is not left out."""
    asks = []
    for number, row in enumerate(rows):
        recipe = recipe_of(number, row, scale.inputs)
        if scale.most_input is not None and length(recipe) > scale.most_input:
            continue
        answer = max(1, round(row.output_tokens * scale.outputs))
        asks.append((row.seconds * scale.time, Ask(recipe, min(answer, scale.most_output or answer))))
    return asks


def recipe_of(number: int, row: TraceRow, factor: float) -> Recipe:
    """Blocks are scaled like prompts, so that what was shared stays shared, and as large a part of the prompt."""
    if not row.hash_ids:
        return (Segment(f"own{number}", max(1, round(row.input_tokens * factor))),)
    block = max(1, round(BLOCK * factor))
    whole, last = row.hash_ids[:-1], row.hash_ids[-1]
    rest = min(block, max(1, round((row.input_tokens - BLOCK * len(whole)) * factor)))
    return (*(Segment(f"block{name}", block) for name in whole), Segment(f"block{last}", rest))


def _mooncake(path: Path, lines: list[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ids = tuple(int(name) for name in row.get("hash_ids", ()))
            found = TraceRow(float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]), ids)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"{path}, line {number} is no Mooncake row: {error!r}") from error
        if found.input_tokens < 1 or (ids and -(-found.input_tokens // BLOCK) != len(ids)):
            raise TraceError(
                f"{path}, line {number}: {found.input_tokens} tokens need {-(-found.input_tokens // BLOCK)} hash ids of"
                f" {BLOCK} tokens, there are {len(ids)}"
            )
        yield found


def _azure(path: Path, lines: list[str]) -> Iterator[TraceRow]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            moment = datetime.fromisoformat(row["TIMESTAMP"][:_DIGITS])
            tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}, line {number} is no Azure row: {error!r}") from error
        yield TraceRow((moment - datetime(1970, 1, 1)).total_seconds(), *tokens, ())  # noqa: DTZ001
