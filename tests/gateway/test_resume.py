"""What is decided about a request that goes on: the budget, the suspects, the merge behind delivered tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation_job import Job, Sampling
from gateway.instances import Fleet, Instance, Pair, Side
from gateway.merge import Deliver, Ending, Event, Finish, Merge, SideEnd, Token
from gateway.policies import Cost, Placing
from gateway.resume import MOST_MOVES, Recovery, cause, ended_by_last
from gateway.router import NoPair, Router
from tests.gateway.test_router import D, P

FAILED = Finish(Ending.FAILED, "it died", "UNAVAILABLE", retryable=True, side=Side.DECODE)
EITHER = replace(FAILED, side=None, hand_over=True)


def job(max_tokens: int, min_tokens: int = 0) -> Job:
    sampling = Sampling(0.0, 1.0, 0, 0.0, 1, 1.0, 0.0, 0.0, (), None, max_tokens, min_tokens, False, ())
    return Job((1, 2, 3), sampling, ())


def test_the_budget_counts_resumes_and_the_pause_grows() -> None:
    recovery, pauses = Recovery(3), []
    for _ in range(3):
        assert recovery.failed(Pair(P[0], D[0]), FAILED)
        pauses.append(recovery.pause_s)
    assert all(later > earlier for earlier, later in pairwise(pauses))
    assert not recovery.failed(Pair(P[0], D[0]), FAILED)
    assert recovery.resumes == 3


def test_a_move_off_a_draining_instance_is_no_failure_but_bounded() -> None:
    recovery, drained = Recovery(1), replace(FAILED, draining=True)
    for _ in range(MOST_MOVES):
        assert recovery.failed(Pair(P[0], D[0]), drained)
    assert not recovery.suspects and cause(drained) == "draining"
    assert recovery.attempts == MOST_MOVES, "each attempt has a number of its own"
    assert not recovery.failed(Pair(P[0], D[0]), drained)
    assert recovery.failed(Pair(P[0], D[0]), FAILED) and recovery.resumes == 1, "the budget is untouched"


@pytest.mark.parametrize(
    ("finish", "suspects", "word"),
    [
        (FAILED, [D[0]], "decode"),
        (replace(FAILED, side=Side.PREFILL), [P[0]], "prefill"),
        (replace(FAILED, status="RESOURCE_EXHAUSTED"), [D[0]], "busy"),
        (EITHER, [P[0], D[0]], "hand_over"),
    ],
)
def test_who_is_suspected_and_what_the_metrics_call_it(finish: Finish, suspects: list[Instance], word: str) -> None:
    recovery = Recovery(1)
    recovery.failed(Pair(P[0], D[0]), finish)
    assert list(recovery.suspects) == suspects
    assert cause(finish) == word


@pytest.mark.parametrize(
    ("delivered", "ending"),
    [([], None), ([5], None), ([5, 9], Ending.STOP), ([9, 5], None), ([5, 6, 7, 8], Ending.LENGTH)],
)
def test_a_last_token_whose_outcome_was_lost_ends_the_request(delivered: list[int], ending: Ending | None) -> None:
    assert ended_by_last(job(4), (9,), delivered) is ending


def test_before_min_tokens_no_token_ends_it() -> None:
    assert ended_by_last(job(8, min_tokens=3), (9,), [9, 9, 9]) is None
    assert ended_by_last(job(8, min_tokens=3), (9,), [9, 9, 9, 9]) is Ending.STOP


# -- where to ------------------------------------------------------------------------------------------------


def choose(router: Router, fleet: Fleet, *suspects: Instance, trusted: bool = False) -> Pair | NoPair:
    return router.choose(fleet, Placing(Cost(1, 1)), 1.0, suspects, trusted)


def test_suspects_are_avoided_while_there_are_others() -> None:
    fleet = Fleet(tuple(P[:2]), tuple(D[:2]))
    for _ in range(4):
        assert choose(Router(), fleet, P[0], D[1], trusted=True) == Pair(P[1], D[0])
    reborn = replace(P[0], epoch=2)
    assert choose(Router(), Fleet((reborn,), (D[0],)), P[0], trusted=True) == Pair(reborn, D[0]), "another incarnation"


def test_a_suspect_is_better_than_nothing_but_not_trusted() -> None:
    fleet = Fleet((P[0],), tuple(D[:2]))
    assert choose(Router(), fleet, P[0], D[0]) == Pair(P[0], D[1]), "one suspect rather than two"
    assert choose(Router(), fleet, P[0], D[0], trusted=True) == NoPair(
        "no other pair is free of the instances that failed"
    )


def test_a_troubled_pair_is_left_alone_and_the_soonest_is_taken_if_all_are() -> None:
    router, fleet = Router(), Fleet((P[0],), tuple(D[:2]))
    for _ in range(3):
        router.handed_over(Pair(P[0], D[0]), False, 1.0)
    assert {choose(router, fleet) for _ in range(4)} == {Pair(P[0], D[1])}
    for _ in range(3):
        router.handed_over(Pair(P[0], D[1]), False, 1.5)
    assert choose(router, fleet) == Pair(P[0], D[0]), "all are troubled: the one that is due first"
    router.handed_over(Pair(P[0], D[1]), True, 1.6)
    assert choose(router, fleet) == Pair(P[0], D[1])


# -- the merge of an attempt that resumes ----------------------------------------------------------------------


def ids(events: list[Event]) -> list[int]:
    return [token.id for event in events if isinstance(event, Deliver) for token in event.tokens]


def test_positions_count_on_and_a_repeated_first_token_is_dropped() -> None:
    merge = Merge([7, 8])
    assert ids(merge.tokens(Side.PREFILL, 2, [Token(9)])) == [9]
    assert not merge.handed_over
    assert ids(merge.tokens(Side.DECODE, 2, [Token(9)])) == []
    assert not merge.handed_over, "the first token alone may be prefill's"
    assert ids(merge.tokens(Side.DECODE, 3, [Token(10)])) == [10]
    assert merge.handed_over
    assert merge.outcome(Side.DECODE, SideEnd.LENGTH, output_tokens=4) == [Finish(Ending.LENGTH)]
    assert merge.delivered == [7, 8, 9, 10]


def test_what_was_delivered_before_must_not_be_contradicted() -> None:
    (finish,) = Merge([7, 8]).tokens(Side.DECODE, 1, [Token(9)])
    assert isinstance(finish, Finish)
    assert "token 1 is 9, but 8 was delivered" in finish.reason


def test_a_success_without_a_new_token_waits_for_it() -> None:
    merge = Merge([7, 8])
    assert merge.outcome(Side.DECODE, SideEnd.STOP) == []
    assert merge.tokens(Side.PREFILL, 2, [Token(9)])[-1] == Finish(Ending.STOP)


@given(st.data())
def test_attempts_that_end_anywhere_together_deliver_each_token_once(data: st.DataObject) -> None:
    output = list(range(100, 100 + data.draw(st.integers(2, 12))))
    delivered: list[int] = []
    late: list[Merge] = []
    while len(delivered) < len(output):
        merge = Merge(delivered)
        first = len(merge.delivered)
        told = {Side.PREFILL: output[first : first + 1], Side.DECODE: output[first:]}
        places = dict.fromkeys(Side, first)
        while merge.finish is None and any(told.values()):
            side = data.draw(st.sampled_from([side for side in Side if told[side]]))
            count = data.draw(st.integers(1, len(told[side])))
            delivered += ids(merge.tokens(side, places[side], [Token(one) for one in told[side][:count]]))
            told[side], places[side] = told[side][count:], places[side] + count
            if data.draw(st.booleans()):
                merge.broke(data.draw(st.sampled_from(list(Side))), "UNAVAILABLE", "gone")
            for old in late:
                assert old.tokens(side, places[side], [Token(5)]) == [], "an attempt that is over tells nothing"
        assert merge.delivered == delivered
        late.append(merge)
    assert delivered == output
