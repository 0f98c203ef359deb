"""Page accounting: the allocator and the leases, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consensus.entry import Key
from pipeline.lease import REQUEST, WRITER, LeaseBook, tick_holder
from pipeline.pages import PagePool

A, B = Key("a", 0), Key("b", 0)


def test_the_lowest_run_that_fits_is_taken() -> None:
    pool = PagePool(10)
    assert pool.take(3) == (0, 1, 2)
    assert pool.take(4) == (3, 4, 5, 6)
    pool.give((0, 1, 2))
    assert pool.take(2) == (0, 1)
    assert pool.take(3) == (7, 8, 9)


def test_without_a_run_that_fits_the_fewest_pieces_are_taken() -> None:
    pool = PagePool(10)
    pool.take(10)
    pool.give((0, 2, 3, 5, 6, 7))
    assert pool.take(5) == (5, 6, 7, 2, 3)


def test_a_page_cannot_be_freed_twice() -> None:
    pool = PagePool(4)
    pool.take(2)
    pool.give((1,))
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give((1,))
    with pytest.raises(AssertionError, match="given twice"):
        PagePool(4).give((1, 1))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_the_pool_agrees_with_a_plain_set(steps: list[tuple[bool, int]]) -> None:
    pool, free, taken = PagePool(16), set(range(16)), []
    for take, n in steps:
        if take and n <= len(free):
            pages = pool.take(n)
            assert len(pages) == n and free.issuperset(pages)
            free -= set(pages)
            taken.append(pages)
        elif not take and taken:
            pages = taken.pop(n % len(taken))
            pool.give(pages)
            free |= set(pages)
        assert pool.ids() == sorted(free) and pool.free == len(free)


def test_pages_are_free_only_when_the_last_holder_is_gone() -> None:
    book = LeaseBook(8)
    book.open(A, 5, REQUEST, WRITER)
    book.hold(A, tick_holder(1))
    assert book.count() == {"free": 3, "owned": 5, "cached": 0, "quarantined": 0}
    assert book.drop(A, REQUEST) == ()
    assert book.count()["quarantined"] == 5 and not book.fits(4)
    assert book.drop(A, tick_holder(1)) == ()
    assert book.drop(A, tick_holder(1)) == (), "a holder that is not there changes nothing"
    assert book.drop(A, WRITER) == (0, 1, 2, 3, 4)
    assert book.count()["free"] == 8
    book.audit()


def test_the_auditor_finds_a_page_in_two_places_and_a_lost_one() -> None:
    book = LeaseBook(4)
    book.open(A, 2, REQUEST)
    book.get(A).pages = (0, 2)
    with pytest.raises(AssertionError, match=r"\[1, 2\]"):
        book.audit()
