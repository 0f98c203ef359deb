"""What both sides do when a slice does not match its checksums."""

from __future__ import annotations

from tests.transfer.sides_rig import D0, D1, LAYERS, ONE, P0, checked, sender, submitted
from transfer.actions import Observe, Send, Verify
from transfer.messages import Again, Destinations, Finished, FinishedAck, Slice, Stop, Stopped
from transfer.receiver import ReceivingSide
from transfer.sender import SendingSide


def test_t13_a_damaged_slice_is_asked_for_once_more_and_an_earlier_finished_counts_no_more() -> None:
    side = checked()
    first, finished = Slice("r/0", 0, LAYERS, 0, 4, b"sums"), Finished("r/0", 4, LAYERS, 512, 1, b"t")
    assert side.on_message(P0, first) == [Verify("r/0", 0, 0, LAYERS, (0, 2), ((20, 4),), b"sums")]
    assert side.on_message(P0, finished) == [], "not before its checksums are verified"
    assert side.verified("r/0", 0, 0, sound=False) == [Send(P0, Again("r/0", 0))]
    assert side.on_message(P0, finished) == [], "a repeat of what was said before"
    assert side.peer_reconnected(P0)[1:] == [Send(P0, Again("r/0", 0))], "said again while it is owed"
    second = Slice("r/0", 1, LAYERS, 0, 4, b"sums", instead_of=0)
    assert [type(action) for action in side.on_message(P0, second)] == [Verify]
    assert side.verified("r/0", 0, 1, sound=True) == []
    assert side.on_message(P0, Finished("r/0", 4, LAYERS, 512, 2, b"t", again=1)) == [
        Send(P0, FinishedAck("r/0")),
        Observe("r/0", "transfer", True, "", b"t"),
    ]
    assert side.counters.damaged == 1


def test_t13_a_slice_damaged_twice_ends_the_room_which_waits_for_its_fence() -> None:
    side = checked()
    side.on_message(P0, Slice("r/0", 0, LAYERS, 0, 4, b"sums"))
    side.on_message(P0, Finished("r/0", 4, LAYERS, 512, 1, b"t"))
    side.verified("r/0", 0, 0, sound=False)
    side.on_message(P0, Slice("r/0", 1, LAYERS, 0, 4, b"sums", instead_of=0))
    reason = f"KV of {P0} arrived damaged twice: layers (0, 2) of positions [0, 4)"
    assert side.verified("r/0", 0, 1, sound=False) == [
        Observe("r/0", "transfer", False, reason),
        Send(P0, Stop("r/0", reason)),
    ]
    assert side.unfenced() == 1
    assert side.on_message(P0, Finished("r/0", 4, LAYERS, 512, 1, b"t")) == [], "said before the second write"
    assert side.on_message(P0, Stopped("r/0")) == [Observe("r/0", "release", True)]


def test_t13_the_sender_writes_a_damaged_slice_once_more_and_finishes_anew() -> None:
    side = SendingSide(0, ONE, True, checksums=True)
    side.peer_connected(D0, ONE)
    assert side.open("r/0", "d", 0, 6) == []
    side.on_message(D0, Destinations("r/0", 6, (5, 6)))
    side.start("r/0", [3, 4])
    (submit,) = submitted(side.written("r/0", 0, 6, LAYERS))
    assert submit.spans == ((12, 4), (16, 2)), "page by page"
    side.completed(1, None, checksums=b"sums")
    side.first_token("r/0", b"t")
    (again,) = submitted(side.on_message(D0, Again("r/0", 0)))
    assert (again.runs, again.layers, again.handle) == (submit.runs, submit.layers, 2)
    assert side.on_message(D0, Again("r/0", 0)) == [] and side.on_message(D0, Again("r/0", 7)) == []
    assert side.on_message(D0, FinishedAck("r/0")) == [], "of what it finished before"
    assert side.completed(2, None, checksums=b"sums") == [
        Send(D0, Slice("r/0", 1, LAYERS, 0, 6, b"sums", instead_of=0)),
        Send(D0, Finished("r/0", 6, LAYERS, 6 * 2 * 64, 2, b"t", again=1)),
    ]
    assert side.counters.again == 1


def test_t13_a_slice_comes_a_second_time_but_not_a_third() -> None:
    """Each counts as received, so a third one would stand for a slice that never came."""
    there = ReceivingSide(0, ONE, checksums=True)
    there.open("r/0", "p", 1, 4)
    there.peer_ready("p", 1, ONE)
    there.send_destinations("r/0", [5])
    there.on_message(P0, Slice("r/0", 0, LAYERS, 0, 2, b"sums"))
    there.verified("r/0", 0, 0, sound=False)
    there.on_message(P0, Slice("r/0", 1, LAYERS, 0, 2, b"sums", instead_of=0))
    assert there.verified("r/0", 0, 1, sound=True) == []
    reason = f"{P0} sent a slice instead of 0, which was not asked for"
    assert there.on_message(P0, Slice("r/0", 2, LAYERS, 0, 2, b"sums", instead_of=0)) == [
        Observe("r/0", "transfer", False, reason),
        Send(P0, Stop("r/0", reason)),
    ]


def test_t13_checksums_take_no_more_room_than_the_pages_they_are_of() -> None:
    most = 2 * 8
    for nbytes in (most, most + 1):
        there = ReceivingSide(0, ONE, checksums=True)
        there.open("r/0", "p", 1, 4)
        there.peer_ready("p", 1, ONE)
        there.send_destinations("r/0", [5])
        actions = there.on_message(P0, Slice("r/0", 0, LAYERS, 0, 4, bytes(nbytes)))
        reason = f"{P0} sent {nbytes} bytes of checksums, {most} is the most"
        assert (Observe("r/0", "transfer", False, reason) in actions) == (nbytes > most)


def test_t13_nothing_is_written_a_third_time_or_after_the_acknowledgement() -> None:
    side = sender((D0, D1))
    assert side.open("r/0", "d", 0, 4) == []
    for peer in (D0, D1):
        side.on_message(peer, Destinations("r/0", 4, (5,)))
    side.start("r/0", [3])
    side.written("r/0", 0, 4, LAYERS)
    for handle in (1, 2):
        side.completed(handle, None)
    (again,) = submitted(side.on_message(D0, Again("r/0", 0)))
    side.completed(again.handle, None)
    assert side.on_message(D0, Again("r/0", 1)) == [], "which was instead of 0"
    side.first_token("r/0", b"t")
    side.on_message(D1, FinishedAck("r/0"))
    assert side.on_message(D1, Again("r/0", 0)) == [], "its pages may be in other use"


def test_a_damaged_slice_is_repeated_only_once() -> None:
    side = checked()
    side.on_message(P0, Slice("r/0", 0, LAYERS, 0, 4, b"sums"))
    side.verified("r/0", 0, 0, sound=False)
    side.on_message(P0, Slice("r/0", 1, LAYERS, 0, 4, b"sums", instead_of=0))
    (failed, *_) = side.on_message(P0, Slice("r/0", 2, LAYERS, 0, 4, b"sums", instead_of=0))
    assert isinstance(failed, Observe) and not failed.good and "not asked for" in failed.reason
