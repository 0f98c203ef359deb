"""When a pair whose hand-overs fail is left alone, and that it always heals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.breaker import Breaker
from gateway.instances import Pair
from tests.gateway.test_router import D, P

PAIR, OTHER = Pair(P[0], D[0]), Pair(P[0], D[1])


def opened(now: float = 10.0) -> Breaker:
    breaker = Breaker(failures=3, pause_s=1.0, longest_s=5.0)
    for _ in range(3):
        assert breaker.due(PAIR) == 0.0
        breaker.failed(PAIR, now)
    return breaker


def test_it_opens_after_failures_in_a_row_and_for_that_pair_alone() -> None:
    breaker = Breaker(failures=2)
    breaker.failed(PAIR, 1.0)
    breaker.succeeded(PAIR)
    breaker.failed(PAIR, 2.0)
    assert breaker.due(PAIR) == 0.0
    breaker.failed(PAIR, 3.0)
    assert breaker.due(PAIR) == 4.0
    assert breaker.due(OTHER) == 0.0


def test_one_request_tries_it_after_the_pause_and_heals_it() -> None:
    breaker = opened()
    assert breaker.due(PAIR) == 11.0
    breaker.chosen(PAIR, 11.0)
    assert breaker.due(PAIR) > 11.0, "the others wait for the one that tries it"
    breaker.succeeded(PAIR)
    assert breaker.due(PAIR) == 0.0


def test_the_pause_grows_to_its_bound_and_begins_anew_after_healing() -> None:
    breaker = opened()
    pauses = []
    for _ in range(4):
        now = breaker.due(PAIR)
        breaker.chosen(PAIR, now)
        breaker.failed(PAIR, now)
        pauses.append(breaker.due(PAIR) - now)
    assert pauses == [2.0, 4.0, 5.0, 5.0]
    breaker.succeeded(PAIR)
    for _ in range(3):
        breaker.failed(PAIR, 100.0)
    assert breaker.due(PAIR) == 101.0


def test_requests_that_began_before_it_opened_do_not_prolong_it() -> None:
    breaker = opened()
    for _ in range(20):
        breaker.failed(PAIR, 10.5)
    assert breaker.due(PAIR) == 11.0


def test_a_try_of_which_nobody_tells_the_end_lapses() -> None:
    breaker = opened()
    breaker.chosen(PAIR, 11.0)
    assert breaker.due(PAIR) == 13.0
    breaker.chosen(PAIR, 13.0)
    breaker.succeeded(PAIR)
    assert breaker.due(PAIR) == 0.0


@given(st.lists(st.tuples(st.sampled_from(["failed", "chosen", "succeeded"]), st.floats(0, 3))))
def test_it_is_never_closed_off_for_longer_than_the_bound(events: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(failures=3, pause_s=1.0, longest_s=5.0), 0.0
    for what, later in events:
        now += later
        if what == "failed":
            breaker.failed(PAIR, now)
        elif what == "chosen":
            breaker.chosen(PAIR, now)
        else:
            breaker.succeeded(PAIR)
        assert breaker.due(PAIR) <= now + 5.0
