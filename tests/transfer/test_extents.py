"""Runs of tokens cover a range exactly, and as few of them as the pages allow."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.extents import ExtentsError, extents
from transfer.regions import RegionError, RegionTable, resolve


@given(st.data(), st.integers(1, 8), st.integers(1, 12))
def test_each_position_is_moved_once_to_its_place(data: st.DataObject, page_size: int, count: int) -> None:
    src = data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count, unique=True))
    dst = data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count + 3, unique=True))
    end = data.draw(st.integers(0, count * page_size))
    start = data.draw(st.integers(0, end))
    runs = extents(src, dst, start, end, page_size)
    moved = [(s + i, d + i) for s, d, tokens in runs for i in range(tokens)]
    assert moved == [
        (src[p // page_size] * page_size + p % page_size, dst[p // page_size] * page_size + p % page_size)
        for p in range(start, end)
    ]
    for (s, d, tokens), after in pairwise(runs):
        assert (s + tokens, d + tokens) != after[:2], "neighbours that touch on both sides are one run"


def test_contiguous_pages_are_one_run_with_only_the_tokens_of_the_last() -> None:
    assert extents([3, 4, 5], [7, 8, 9], 0, 10, 4) == [(12, 28, 10)]


def test_a_gap_on_one_side_is_enough_to_split() -> None:
    assert extents([3, 4, 6], [7, 8, 9], 0, 12, 4) == [(12, 28, 8), (24, 36, 4)]


def test_more_source_than_destination_pages_is_an_error_not_a_shorter_transfer() -> None:
    with pytest.raises(ExtentsError, match="do not fit"):
        extents([1, 2, 3], [1, 2], 0, 4, 4)


def test_a_range_beyond_the_pages_is_an_error() -> None:
    with pytest.raises(ExtentsError, match="beyond"):
        extents([1], [1, 2], 0, 5, 4)


def table(tokens: int = 100, heads: tuple[int, int] = (0, 2), base: int = 10_000) -> RegionTable:
    width = 8 * (heads[1] - heads[0])
    return RegionTable((2, 4), heads, tokens, (width, width), tuple((base * i, base * i + 5000) for i in (1, 2)))


def test_addresses_of_whole_heads_are_one_write_per_layer_buffer_and_run() -> None:
    writes = resolve(table(), table(base=20_000), (3, 4), (0, 2), [(4, 8, 12)])
    assert writes == [(20_000 + 64, 40_000 + 128, 192), (25_000 + 64, 45_000 + 128, 192)]


def test_a_head_range_goes_token_by_token() -> None:
    writes = resolve(table(), table(heads=(1, 2), base=20_000), (2, 3), (1, 2), [(4, 8, 2)])
    assert writes == [
        (10_000 + 64 + 8, 20_000 + 64, 8),
        (10_000 + 80 + 8, 20_000 + 72, 8),
        (15_000 + 64 + 8, 25_000 + 64, 8),
        (15_000 + 80 + 8, 25_000 + 72, 8),
    ]


@pytest.mark.parametrize(
    ("layers", "heads", "run"),
    [
        ((1, 3), (0, 2), (0, 0, 1)),
        ((2, 5), (0, 2), (0, 0, 1)),
        ((2, 3), (0, 3), (0, 0, 1)),
        ((2, 3), (0, 2), (0, 41, 10)),
        ((2, 3), (0, 2), (91, 0, 10)),
        ((2, 3), (0, 2), (-1, 0, 10)),
        ((2, 3), (0, 2), (0, 0, 0)),
    ],
)
def test_nothing_outside_either_pool_is_resolved(
    layers: tuple[int, int], heads: tuple[int, int], run: tuple[int, int, int]
) -> None:
    with pytest.raises(RegionError):
        resolve(table(), table(tokens=50), layers, heads, [run])
