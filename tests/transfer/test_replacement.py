"""A sending engine is replaced: what that proves, for whose pages, and when."""

from __future__ import annotations

from collections.abc import Sequence

from tests.transfer.pools import pipeline
from tests.transfer.sides_rig import D0, LAYERS, ONE, P0, ready, receiving, sender, submitted
from transfer.actions import Observe, Peer, Send
from transfer.messages import Destinations, Failed, Stop, Stopped
from transfer.replacement import Backoff, ReplacementLimits, Suspects, Tails
from transfer.sender import SendingSide

LIMITS = ReplacementLimits()
TWO = pipeline(2, 2)


def kinds(actions: Sequence[object]) -> list[type]:
    return [type(action.message) if isinstance(action, Send) else type(action) for action in actions]


def broken() -> SendingSide:
    """One room whose only handle ended badly."""
    side = sender()
    ready(side)
    side.written("r/0", 0, 4, LAYERS)
    assert kinds(side.completed(1, "cut")) == [Observe, Failed]
    return side


def test_the_end_of_the_engine_releases_our_pages_and_only_the_tail_fences_theirs() -> None:
    side = broken()
    engine = side.retire_engine()
    assert side.rooms()[0].unproven == 1
    assert side.engine_replaced(engine) == [Observe("r/0", "release", True)]
    assert (side.unproven(), side.trailing(), side.trailing_peers(engine)) == (0, 1, (D0,))
    assert side.on_message(D0, Stop("r/0", "again"))[1:] == [], "asked, but there is no fence yet"
    assert side.peer_connected(D0, ONE)[1:] == [], "nor for a new link"
    assert side.tail_passed(engine, Peer("d", 1, 1)) == [], "another peer's tail"
    assert side.tail_passed(engine, D0) == [Send(D0, Stopped("r/0"))]
    assert side.tail_passed(engine, D0) == [] and side.trailing_peers(engine) == ()
    assert side.close("r/0") == [] and side.rooms() == ()


def test_a_closed_room_is_kept_until_its_tail_has_passed_and_says_nothing_but_the_fence() -> None:
    side = broken()
    assert side.close("r/0") == []
    engine = side.retire_engine()
    assert side.engine_replaced(engine) == [], "the log has ended the room: nobody waits for a release"
    assert side.rooms()[0].trailing == 1
    assert side.tail_passed(engine, D0) == [Send(D0, Stopped("r/0"))]
    assert side.rooms() == ()


def test_a_handle_that_ended_well_after_all_needs_no_tail() -> None:
    side = broken()
    engine = side.retire_engine()
    assert side.completed(1, None) == [Send(D0, Stopped("r/0")), Observe("r/0", "release", True)]
    assert side.engine_replaced(engine) == [] and side.trailing_peers(engine) == ()


def test_what_is_in_flight_when_its_engine_ends_fails_its_room() -> None:
    side = sender()
    ready(side)
    (submit,) = submitted(side.written("r/0", 0, 2, LAYERS))
    engine = side.retire_engine()
    (later,) = submitted(side.written("r/0", 2, 4, LAYERS))
    actions = side.engine_replaced(engine)
    assert isinstance(actions[0], Observe) and "engine was replaced" in actions[0].reason
    assert kinds(actions) == [Observe, Failed], "the second write is with the new engine, and reads our pages"
    assert side.completed(submit.handle, None) == [] and side.counters.stray == 1
    assert side.completed(later.handle, None) == [Observe("r/0", "release", True)]
    assert side.tail_passed(engine, D0) == [Send(D0, Stopped("r/0"))]


def test_a_handle_that_no_engine_had_yet_belongs_to_the_next_one() -> None:
    side = sender()
    ready(side)
    (held,) = submitted(side.written("r/0", 0, 4, LAYERS))
    assert side.wanted(held.handle)
    engine = side.retire_engine([held.handle])
    assert side.engine_replaced(engine) == []
    side.stop("r/0", "abort")
    assert not side.wanted(held.handle) and not side.wanted(99)
    assert kinds(side.completed(held.handle, "its room ended", quiet=True)) == [Stopped, Observe]


def test_a_second_replacement_during_the_tail_of_the_first_has_a_tail_of_its_own() -> None:
    side = SendingSide(0, ONE, True)
    d0, d1 = D0, Peer("d", 1, 1)
    for peer in (d0, d1):
        side.peer_connected(peer, TWO)
    side.open("r/0", "d", 1, 4)
    for peer in (d0, d1):
        side.on_message(peer, Destinations("r/0", 4, (5,)))
    side.start("r/0", [3])
    one, other = submitted(side.written("r/0", 0, 4, LAYERS))
    assert (one.peer, other.peer) == (d0, d1)
    side.completed(one.handle, "cut")
    first = side.retire_engine([other.handle])
    assert side.engine_replaced(first) == [], "the other target's write still reads our pages"
    side.completed(other.handle, "cut too")
    second = side.retire_engine()
    assert side.engine_replaced(second) == [Observe("r/0", "release", True)]
    assert (side.trailing_peers(first), side.trailing_peers(second)) == ((d0,), (d1,))
    assert side.tail_passed(first, d1) == [], "that one's tail is the second's"
    assert side.tail_passed(first, d0) == [Send(d0, Stopped("r/0"))]
    assert side.tail_passed(second, d1) == [Send(d1, Stopped("r/0"))]


def test_the_receiver_releases_at_the_fence_that_comes_long_after_the_failure() -> None:
    side = receiving()
    assert side.on_message(P0, Failed("r/0", "cut")) == [
        Observe("r/0", "transfer", False, "cut"),
        Send(P0, Stop("r/0", "cut")),
    ]
    assert side.unfenced() == 1
    assert side.on_message(P0, Stopped("r/0")) == [Observe("r/0", "release", True)]
    assert side.unfenced() == 0 and side.close("r/0") == [] and side.rooms() == ()


# ---- when


def test_suspicion_is_as_old_as_its_oldest_handle_that_is_still_unknown() -> None:
    suspects = Suspects()
    assert suspects.age(100.0) == 0.0
    suspects.ended(1, "cut", False, 10.0)
    suspects.ended(2, "late", False, 11.0)
    suspects.ended(1, "cut", False, 11.5)
    assert (suspects.age(12.0), suspects.reason, len(suspects)) == (2.0, "cut", 2)
    suspects.ended(1, None, False, 12.0)
    assert suspects.age(12.0) == 1.0
    suspects.ended(2, "given up", True, 12.0)
    suspects.ended(3, "never began", True, 12.0)
    assert suspects.age(20.0) == 0.0
    suspects.ended(4, "cut again", False, 20.0)
    assert suspects.reason == "cut again"


def test_each_replacement_puts_the_next_one_off_and_a_quiet_time_forgets() -> None:
    backoff = Backoff(1.0, 30.0)
    now, waits = 0.0, []
    for _ in range(7):
        assert backoff.ready(now)
        backoff.used(now)
        assert not backoff.ready(now + backoff.wait - 0.01)
        waits.append(backoff.wait)
        now += backoff.wait
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    backoff.used(now + 60.0)
    assert backoff.wait == 1.0


def test_a_tail_ends_with_a_word_of_the_peer_after_its_time_and_a_moment_to_settle() -> None:
    tails = Tails(LIMITS)
    tails.destroyed(1, (D0,), 0.0)
    tails.heard(D0, 19.0)
    assert tails.unheard(19.9) == () and tails.passed(19.9) == []
    assert tails.unheard(20.0) == (D0,) and tails.passed(500.0) == [], "frozen: its kernel may hold our bytes"
    tails.heard(Peer("d", 1, 1), 500.0)
    tails.heard(D0, 500.0)
    assert tails.unheard(500.0) == () and tails.passed(500.9) == []
    tails.heard(D0, 500.9)
    assert tails.passed(501.0) == [(1, D0)]
    assert tails.passed(502.0) == [] and len(tails) == 0


def test_two_tails_of_one_peer_are_each_their_own() -> None:
    tails = Tails(LIMITS)
    tails.destroyed(1, (D0,), 0.0)
    tails.destroyed(2, (D0,), 15.0)
    tails.heard(D0, 21.0)
    assert tails.passed(30.0) == [(1, D0)]
    tails.heard(D0, 36.0)
    assert tails.passed(37.0) == [(2, D0)]


def test_a_peer_that_is_dead_or_silent_for_ever_needs_no_fence() -> None:
    tails = Tails(LIMITS)
    tails.destroyed(1, (D0, Peer("e", 1, 0)), 0.0)
    tails.gone("d", 0)
    assert tails.passed(1.0) == []
    tails.gone("d", 2)
    assert tails.passed(1.0) == [(1, D0)]
    assert tails.passed(LIMITS.tail + LIMITS.give_up) == [(1, Peer("e", 1, 0))]
