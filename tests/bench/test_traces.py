"""Recorded loads: times, lengths, and blocks that were shared stay shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.prompts import Writer, ids_between
from bench.traces import BLOCK, Scale, TraceError, read_trace, replay
from bench.workload import Recipe

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.2299600,3180,8
"""


def mooncake(path: Path, *rows: tuple[int, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def prompts(path: Path, scale: Scale = Scale()) -> list[list[int]]:  # noqa: B008
    writer = Writer(5, ids_between(100, 40_000))
    recipes: list[Recipe] = [ask.prompt for _, ask in replay(read_trace(path), scale)]  # type: ignore[misc]
    return [writer.ids(recipe) for recipe in recipes]


def shared(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.03])
def test_equal_hash_ids_become_equal_tokens_and_nothing_else_is_equal(tmp_path: Path, factor: float) -> None:
    trace = mooncake(
        tmp_path / "t", (0, 1400, 5, [0, 1, 2]), (0, 1536, 5, [0, 1, 9]), (0, 1000, 5, [0, 7]), (0, 600, 5, [8, 1])
    )
    first, second, third, fourth = prompts(trace, Scale(inputs=factor))
    block = round(BLOCK * factor)
    assert [len(p) for p in (first, second, third)] == [
        2 * block + round(376 * factor), 3 * block, block + round(488 * factor)
    ]  # fmt: skip
    assert shared(first, second) == 2 * block
    assert shared(first, third) == block
    assert shared(first, fourth) == 0
    # The same block in the same place, behind another one: the same tokens, and no common prefix.
    assert fourth[block:] == first[block : block + len(fourth) - block]


def test_a_block_cut_short_is_the_beginning_of_the_whole_one(tmp_path: Path) -> None:
    short, whole = prompts(mooncake(tmp_path / "t", (0, 700, 5, [3, 4]), (0, 1024, 5, [3, 4])))
    assert whole[:700] == short


def test_times_begin_at_0_and_lengths_and_times_are_scaled(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "t", (2000, 512, 100, [1]), (3500, 512, 7, [2]))
    found = replay(read_trace(trace), Scale(inputs=0.5, outputs=0.5, time=2.0, most_output=20))
    assert [(due, ask.max_tokens) for due, ask in found] == [(0.0, 20), (3.0, 4)]


def test_longer_prompts_are_left_out_after_scaling(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "t", (0, 512, 5, [1]), (1000, 1024, 5, [2, 3]))
    assert len(replay(read_trace(trace), Scale(most_input=600))) == 1
    assert len(replay(read_trace(trace), Scale(inputs=0.5, most_input=600))) == 2


def test_azure_times_have_a_digit_too_many_and_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(AZURE)
    rows = read_trace(tmp_path / "a.csv")
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(4808, 10), (3180, 8)]
    assert [row.seconds for row in rows] == pytest.approx([0.0, 0.25])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ('{"timestamp": 0}', "line 1 is no Mooncake row.*input_length"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "513 tokens need 2 hash ids"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1", "line 2 is no Azure row"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "t")
