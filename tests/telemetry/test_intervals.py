"""Intervals of time, beside sets of the moments they are made of."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from telemetry.intervals import Span, length, uncovered, union, within

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))), max_size=6)


def moments(spans: Iterable[Span]) -> set[int]:
    return {moment for begin, end in spans for moment in range(begin, end)}


@given(SPANS, SPANS, st.integers(0, 30), st.integers(0, 30))
def test_they_hold_the_same_moments_as_sets_do(one: list[Span], other: list[Span], begin: int, end: int) -> None:
    whole, covering = union(one), union(other)
    assert moments(whole) == moments(one)
    assert all(a[1] < b[0] for a, b in zip(whole, whole[1:], strict=False))
    assert length(whole) == len(moments(one))
    assert moments(uncovered(whole, covering)) == moments(one) - moments(other)
    assert moments(within(whole, begin, end)) == moments(one) & set(range(begin, end))
