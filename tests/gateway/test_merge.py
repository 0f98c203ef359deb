"""How two streams become one: every rule of gateway.merge, and random interleavings of good streams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.instances import Side
from gateway.merge import Deliver, Ending, Event, Finish, Merge, SideEnd, Token

P, D = Side.PREFILL, Side.DECODE


def toks(*ids: int) -> list[Token]:
    return [Token(i) for i in ids]


def ids_of(events: list[Event]) -> list[int]:
    return [token.id for event in events if isinstance(event, Deliver) for token in event.tokens]


def finish_of(events: list[Event]) -> Finish | None:
    finishes = [event for event in events if isinstance(event, Finish)]
    assert len(finishes) <= 1
    assert not finishes or events[-1] is finishes[0], "the finish comes last"
    return finishes[0] if finishes else None


def test_the_usual_story() -> None:
    merge = Merge()
    assert ids_of(merge.tokens(P, 0, toks(5))) == [5]
    assert merge.outcome(P, SideEnd.HANDED_OVER) == []
    assert merge.tokens(D, 0, toks(5)) == [], "a first token told twice is delivered once"
    assert ids_of(merge.tokens(D, 1, toks(6, 7))) == [6, 7]
    assert merge.outcome(D, SideEnd.LENGTH, output_tokens=3) == [Finish(Ending.LENGTH)]
    assert merge.has_ended(P)
    assert merge.has_ended(D)


def test_first_token_may_come_from_decode_alone() -> None:
    merge = Merge()
    merge.outcome(P, SideEnd.HANDED_OVER)
    assert ids_of(merge.tokens(D, 0, toks(5, 6))) == [5, 6]


def test_a_chunk_that_overlaps_delivers_its_new_part() -> None:
    merge = Merge()
    merge.tokens(P, 0, toks(5))
    assert ids_of(merge.tokens(D, 0, toks(5, 6))) == [6]


def test_decode_overtaking_the_first_token_waits_for_it() -> None:
    merge = Merge()
    assert merge.tokens(D, 1, toks(6)) == []
    assert merge.outcome(D, SideEnd.STOP, output_tokens=2) == []
    events = merge.tokens(P, 0, toks(5))
    assert ids_of(events) == [5, 6]
    assert finish_of(events) == Finish(Ending.STOP)


@pytest.mark.parametrize("at", [2, 3, 1 << 40])
def test_more_tokens_than_were_asked_for_are_an_error_and_never_kept(at: int) -> None:
    merge = Merge([], most=3)
    merge.tokens(P, 0, toks(5))
    if at == 2:
        merge.tokens(D, 1, toks(6))
    finish = finish_of(merge.tokens(D, at, toks(7, 8)))
    assert finish is not None and not finish.retryable
    assert finish.reason == f"decode side: told a token at position {at + 1} of at most 3"


@pytest.mark.parametrize("lose", ["handed over", "broke"])
def test_a_first_token_that_can_never_come_is_an_error(lose: str) -> None:
    merge = Merge()
    merge.tokens(D, 1, toks(6))
    events = merge.outcome(P, SideEnd.HANDED_OVER) if lose == "handed over" else merge.broke(P, "UNAVAILABLE", "gone")
    finish = finish_of(events)
    assert finish is not None
    assert finish.ending is Ending.FAILED
    assert "position 0 never came" in finish.reason


def test_a_gap_within_one_side_is_an_error_at_once() -> None:
    merge = Merge()
    merge.tokens(P, 0, toks(5))
    merge.tokens(D, 1, toks(6))
    finish = finish_of(merge.tokens(D, 3, toks(8)))
    assert finish is not None
    assert finish.reason == "decode side: told a token at position 3 where 2 was due"
    assert merge.tokens(D, 4, toks(9)) == [], "nothing after the finish"


def test_sides_that_disagree_about_a_token_are_an_error() -> None:
    merge = Merge()
    merge.tokens(P, 0, toks(5))
    finish = finish_of(merge.tokens(D, 0, toks(4)))
    assert finish is not None
    assert "token 0 is 4, but 5 was delivered" in finish.reason


def test_first_token_that_ends_the_request_ends_it_at_once() -> None:
    merge = Merge()
    merge.tokens(P, 0, toks(2))
    assert merge.outcome(P, SideEnd.STOP, output_tokens=1) == [Finish(Ending.STOP)]
    assert not merge.has_ended(D)
    assert merge.outcome(D, SideEnd.STOP, output_tokens=1) == []
    assert merge.has_ended(D)


def test_success_without_any_token_waits_for_one() -> None:
    merge = Merge()
    assert merge.outcome(D, SideEnd.STOP, output_tokens=0) == []
    events = merge.tokens(P, 0, toks(2))
    assert ids_of(events) == [2]
    assert finish_of(events) == Finish(Ending.STOP)


def test_tokens_missing_at_the_end_are_an_error() -> None:
    merge = Merge()
    merge.tokens(P, 0, toks(5))
    merge.outcome(P, SideEnd.HANDED_OVER)
    finish = finish_of(merge.outcome(D, SideEnd.STOP, output_tokens=3))
    assert finish is not None
    assert finish.reason == "decode side: told 1 of its 3 tokens"


@pytest.mark.parametrize("end", [SideEnd.ERROR, SideEnd.ABORT])
@pytest.mark.parametrize("side", [P, D])
def test_failure_of_either_side_before_the_hand_over_ends_the_request(side: Side, end: SideEnd) -> None:
    merge = Merge()
    merge.tokens(P, 0, toks(5))
    finish = finish_of(merge.outcome(side, end, "page pool on fire"))
    assert finish is not None
    assert finish.ending is Ending.FAILED
    assert finish.reason == f"{side.value} side: page pool on fire"


def test_prefill_failing_after_the_hand_over_is_of_no_interest() -> None:
    merge = Merge()
    merge.tokens(P, 0, toks(5))
    merge.tokens(D, 1, toks(6))
    assert merge.broke(P, "UNAVAILABLE", "gone") == []
    assert ids_of(merge.tokens(D, 2, toks(7))) == [7]
    assert merge.outcome(D, SideEnd.STOP, output_tokens=3) == [Finish(Ending.STOP)]


def test_a_broken_stream_keeps_its_status() -> None:
    finish = finish_of(Merge().broke(P, "INVALID_ARGUMENT", "too long"))
    assert finish == Finish(Ending.FAILED, "prefill side: too long", "INVALID_ARGUMENT", side=P)
    finish = finish_of(Merge().broke(D, "UNAVAILABLE", "loading"))
    assert finish == Finish(Ending.FAILED, "decode side: loading", "UNAVAILABLE", retryable=True, side=D)


def test_only_prefill_hands_over_and_nobody_ends_twice() -> None:
    finish = finish_of(Merge().outcome(D, SideEnd.HANDED_OVER))
    assert finish is not None
    assert finish.ending is Ending.FAILED
    merge = Merge()
    merge.outcome(P, SideEnd.HANDED_OVER)
    finish = finish_of(merge.outcome(P, SideEnd.HANDED_OVER))
    assert finish is not None
    assert finish.reason == "prefill side: told two outcomes"


def test_closing_by_the_gateway_silences_both_sides() -> None:
    merge = Merge()
    assert merge.close(Finish(Ending.STOP)) == [Finish(Ending.STOP)]
    assert merge.close(Finish(Ending.FAILED)) == []
    assert merge.tokens(P, 0, toks(1)) == []
    assert merge.broke(D, "CANCELLED", "") == []


@given(st.data())
def test_any_interleaving_of_good_streams_gives_the_same_story(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    output = [100 + i for i in range(count)]
    told_again = data.draw(st.booleans())
    prefill: list[tuple[str, int, int]] = [("tokens", 0, 1), ("handed over", 0, 0)]
    decode: list[tuple[str, int, int]] = []
    at = 0 if told_again else 1
    while at < count:
        size = data.draw(st.integers(1, 3))
        decode.append(("tokens", at, min(at + size, count)))
        at += size
    decode.append(("length", 0, 0))
    merge, seen, finish = Merge(), [], None
    while prefill or decode:
        side = data.draw(st.sampled_from([s for s, left in ((P, prefill), (D, decode)) if left]))
        what, begin, end = (prefill if side is P else decode).pop(0)
        if what == "tokens":
            events = merge.tokens(side, begin, toks(*output[begin:end]))
        elif what == "length":
            events = merge.outcome(side, SideEnd.LENGTH, output_tokens=count)
        else:
            events = merge.outcome(side, SideEnd.HANDED_OVER)
        assert finish is None or not events
        seen += ids_of(events)
        finish = finish or finish_of(events)
    assert seen == output
    assert finish == Finish(Ending.LENGTH)
