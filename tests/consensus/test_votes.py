"""Two-pass ring votes: joining, concluding, and the book of bells and ballots."""

from __future__ import annotations

from consensus.entry import TRANSFER, Ballot, Key, StageKey, Verdict
from consensus.votes import BallotBox, Bell, conclude, join


def key(name: str, seq: int = 1) -> StageKey:
    return StageKey(Key(name, 0), seq)


def test_good_is_the_intersection_and_bad_the_union_with_the_first_reason() -> None:
    a, b, c = key("a"), key("b"), key("c")
    first = Ballot(TRANSFER, (a, b), ((c, "rank 0: late"),))
    second = Ballot(TRANSFER, (b, c), ((a, "rank 1: torn"), (c, "rank 1: too")))
    joined = join(first, second)
    assert joined == Ballot(TRANSFER, (b,), ((c, "rank 0: late"), (a, "rank 1: torn")))
    assert conclude(Ballot(TRANSFER, (a, b), ((a, "x"),))).good == (b,)


def test_good_of_another_stage_does_not_count() -> None:
    assert join(Ballot(TRANSFER, (key("a", 4),), ()), Ballot(TRANSFER, (key("a", 9),), ())).good == ()


def ring(box: BallotBox, rank: int, name: str, good: bool = True) -> None:
    box.ring(Bell(rank, TRANSFER, key(name), good))


def test_a_ballot_opens_when_all_rang_good_or_one_rang_bad() -> None:
    box = BallotBox(2, (TRANSFER,))
    ring(box, 0, "a")
    ring(box, 0, "a")
    assert box.due(5) == ()
    ring(box, 1, "a")
    assert box.due(5) == (TRANSFER,)
    other = BallotBox(2, (TRANSFER,))
    ring(other, 1, "a", good=False)
    assert other.due(5) == (TRANSFER,)


def test_one_ballot_at_a_time_and_a_bell_during_it_opens_another_after_the_verdict() -> None:
    box = BallotBox(1, (TRANSFER,))
    ring(box, 0, "a")
    box.opened(box.due(5), 5)
    ring(box, 0, "b")
    assert box.due(6) == ()
    box.settled(Verdict(TRANSFER, 5, ((key("a"), b""),), ()), 7)
    assert box.due(7) == (), "no earlier than the entry after the verdict's"
    assert box.due(8) == (TRANSFER,)
    assert box.bells == 1


def test_bells_of_a_stage_that_was_left_are_void() -> None:
    box = BallotBox(2, (TRANSFER,))
    ring(box, 0, "a")
    box.forget(Key("a", 0), None)
    assert box.bells == 0
    box.ring(Bell(1, TRANSFER, key("a", 9), True))
    assert box.due(9) == ()
