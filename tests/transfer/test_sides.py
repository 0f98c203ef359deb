"""What each side does in the cases that chance seldom reaches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.transfer.pools import BYTES_PER_TOKEN, pipeline
from transfer import receiving_room, sending_room
from transfer.actions import Grant, NeedPeer, Observe, Peer, Revoke, Send, Submit, Verify
from transfer.messages import Again, Destinations, Failed, Finished, FinishedAck, Slice, Stop, Stopped
from transfer.plan import Topology
from transfer.receiver import ReceivingSide
from transfer.sender import SendingSide

ONE, TWO = pipeline(1, 2), pipeline(2, 2)
D0, D1, P0 = Peer("d", 1, 0), Peer("d", 1, 1), Peer("p", 1, 0)
LAYERS = (0, 2)


def sender(peers: Sequence[Peer] = (D0,), **limits: int) -> SendingSide:
    side = SendingSide(0, ONE, True, **limits)
    for peer in peers:
        assert side.peer_connected(peer, ONE if len(peers) == 1 else TWO) == []
    return side


def ready(side: SendingSide, tokens: int = 4) -> None:
    assert side.open("r/0", "d", 0, tokens) == []
    assert side.on_message(D0, Destinations("r/0", tokens, (5,))) == [Observe("r/0", "bootstrap", True)]
    assert side.start("r/0", [3]) == []


def submitted(actions: Sequence[object]) -> list[Submit]:
    return [action for action in actions if isinstance(action, Submit)]


def test_the_terminal_states_absorb() -> None:
    for state in (sending_room.Sending.DONE, sending_room.Sending.FAILED):
        assert sending_room.LEGAL[state] == ()
    for end in (receiving_room.Receiving.DONE, receiving_room.Receiving.FENCED):
        assert receiving_room.LEGAL[end] == ()
    assert set(sending_room.LEGAL) == set(sending_room.Sending)
    assert set(receiving_room.LEGAL) == set(receiving_room.Receiving)


def test_one_room_from_open_to_close() -> None:
    side = sender()
    ready(side)
    (submit,) = side.written("r/0", 0, 4, LAYERS)
    assert submit == Submit(D0, 1, "r/0", LAYERS, (0, 2), ((12, 20, 4),))
    landed = Slice("r/0", 0, LAYERS, 0, 4)
    assert side.completed(1, None) == [Send(D0, landed)]
    finished = Finished("r/0", 4, LAYERS, 4 * 2 * 64, 1, b"t")
    assert side.first_token("r/0", b"t") == [Send(D0, finished)]
    assert side.first_token("r/0", b"t") == []
    again = [Send(D0, landed), Send(D0, finished)]
    assert side.peer_connected(D0, ONE) == again, "said again until it is acknowledged"
    assert side.on_message(D0, FinishedAck("r/0")) == [Observe("r/0", "transfer", True)]
    assert side.on_message(D0, FinishedAck("r/0")) == []
    assert side.stop("r/0", "abort") == [Observe("r/0", "release", True)], "an abort that crossed the end"
    assert side.close("r/0") == [] and side.rooms() == ()


def test_layers_are_pushed_as_they_come_and_each_only_once() -> None:
    side = sender()
    ready(side)
    (first,) = submitted(side.written("r/0", 0, 4, (0, 1)))
    assert (first.layers, first.runs) == ((0, 1), ((12, 20, 4),))
    assert side.written("r/0", 0, 4, (0, 1)) == []
    (second,) = submitted(side.written("r/0", 0, 3, (1, 2)))
    assert (second.layers, second.runs) == ((1, 2), ((12, 20, 3),))
    (third,) = submitted(side.written("r/0", 0, 4, (1, 2)))
    assert third.runs == ((15, 23, 1),)


def test_to_a_target_that_takes_nothing_little_is_in_flight_and_the_rest_follows_in_large_pieces() -> None:
    tokens = 400
    side = sender()
    assert side.open("r/0", "d", 0, tokens) == []
    side.on_message(D0, Destinations("r/0", tokens, tuple(range(100))))
    side.start("r/0", range(100))
    begun = [
        submit
        for start in range(0, tokens, 4)
        for layer in (0, 1)
        for submit in submitted(side.written("r/0", start, start + 4, (layer, layer + 1)))
    ]
    assert len(begun) == side.in_flight() == sending_room.IN_FLIGHT
    after = [one for submit in begun for one in submitted(side.completed(submit.handle, None))]
    assert [(one.layers, sum(tokens for _, _, tokens in one.runs)) for one in after] == [(LAYERS, tokens - 4 * 8)]
    side.completed(after[0].handle, None)
    assert side.first_token("r/0", b"t") == [
        Send(D0, Finished("r/0", tokens, LAYERS, tokens * 2 * 64, sending_room.IN_FLIGHT + 1, b"t"))
    ]


def test_nothing_is_submitted_once_a_room_has_failed_and_stopped_waits_for_the_handles() -> None:
    side = sender()
    ready(side)
    assert len(submitted(side.written("r/0", 0, 2, LAYERS))) == 1
    assert side.on_message(D0, Stop("r/0", "abort")) == [
        Observe("r/0", "transfer", False, "stopped: abort"),
        Send(D0, Failed("r/0", "stopped: abort")),
    ]
    assert side.written("r/0", 2, 4, LAYERS) == [] and side.first_token("r/0", b"t") == []
    assert side.on_message(D0, Stop("r/0", "abort")) == [Send(D0, Failed("r/0", "stopped: abort"))]
    assert side.close("r/0") == [] and side.in_flight() == 1, "closed, but not forgotten"
    assert side.completed(1, None) == [Send(D0, Stopped("r/0"))]
    assert side.rooms() == () and side.written("r/0", 2, 4, LAYERS) == []
    assert side.on_message(D0, Stop("r/0", "abort")) == [Send(D0, Stopped("r/0"))]


def test_a_failed_handle_is_unproven_until_it_ends_well_after_all() -> None:
    side = sender()
    ready(side)
    side.written("r/0", 0, 4, LAYERS)
    actions = side.completed(1, "no end within its deadline")
    assert [a for a in actions if isinstance(a, Send)] == [Send(D0, Failed("r/0", actions[0].reason))]  # type: ignore[union-attr]
    assert side.unproven() == 1 and side.in_flight() == 0
    assert side.stop("r/0", "abort") == [] and side.close("r/0") == []
    assert side.on_message(D0, Stop("r/0", "abort"))[1:] == [], "not a word of Stopped"
    assert side.rooms()[0].unproven == 1
    assert side.completed(1, None) == [Send(D0, Stopped("r/0"))]
    assert side.rooms() == ()


def test_a_handle_that_never_started_is_no_danger() -> None:
    side = sender()
    ready(side)
    side.written("r/0", 0, 4, LAYERS)
    actions = side.completed(1, "the peer is not connected", quiet=True)
    assert Send(D0, Stopped("r/0")) in actions and Observe("r/0", "release", True) in actions


def test_stop_before_the_log_opened_the_room_leaves_a_tombstone() -> None:
    side = sender()
    assert side.on_message(D0, Destinations("r/0", 4, (5,))) == []
    assert side.on_message(D0, Stop("r/0", "abort")) == [Send(D0, Stopped("r/0"))]
    assert side.open("r/0", "d", 0, 4) == [
        Observe("r/0", "bootstrap", False, "stopped: abort"),
        Observe("r/0", "release", True),
    ]
    assert side.on_message(D0, Destinations("r/0", 4, (5,))) == [
        Send(D0, Failed("r/0", "stopped: abort")),
        Send(D0, Stopped("r/0")),
    ]


def test_destinations_before_the_log_opened_the_room_wait_for_it() -> None:
    side = sender()
    assert side.on_message(D0, Destinations("r/0", 4, (5,))) == []
    assert side.open("r/0", "d", 1, 4) == [Observe("r/0", "bootstrap", True)]


@pytest.mark.parametrize("limits", [{"parked_rooms": 1}, {"parked_pages": 3}])
def test_what_waits_is_bounded_and_the_rest_is_refused_not_forgotten(limits: dict[str, int]) -> None:
    side = sender(**limits)
    assert side.on_message(D0, Destinations("a/0", 4, (1, 2))) == []
    (refused,) = side.on_message(D0, Destinations("b/0", 4, (1, 2)))
    assert isinstance(refused, Send) and isinstance(refused.message, Failed)
    (bad, _) = side.open("b/0", "d", 0, 4)
    assert isinstance(bad, Observe) and not bad.good


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Destinations("r/0", 5, (5, 6)), "prompt length: 4 here, 5 at"),
        (Destinations("r/0", 4, ()), "do not hold 4 positions"),
    ],
)
def test_destinations_that_contradict_us_end_the_room(message: Destinations, reason: str) -> None:
    side = sender()
    side.open("r/0", "d", 0, 4)
    observed = side.on_message(D0, message)[0]
    assert isinstance(observed, Observe) and observed.topic == "bootstrap" and reason in observed.reason


def test_destinations_that_change_end_the_room_and_a_repeat_does_not() -> None:
    side = sender()
    ready(side)
    assert side.on_message(D0, Destinations("r/0", 4, (5,))) == []
    observed = side.on_message(D0, Destinations("r/0", 4, (6,)))[0]
    assert observed == Observe("r/0", "transfer", False, f"{D0} changed its destinations")


def test_too_few_source_pages_end_the_room_and_never_shorten_it() -> None:
    side = sender()
    side.open("r/0", "d", 0, 5)
    side.on_message(D0, Destinations("r/0", 5, (5, 6)))
    observed = side.start("r/0", [3])[0]
    assert observed == Observe("r/0", "transfer", False, "1 source pages do not hold 5 positions")


def test_bootstrap_needs_every_target() -> None:
    side = sender((D0, D1))
    side.open("r/0", "d", 1, 4)
    assert side.on_message(D1, Destinations("r/0", 4, (5,))) == []
    assert side.on_message(D0, Destinations("r/0", 4, (5,))) == [Observe("r/0", "bootstrap", True)]


def test_a_lost_decode_ends_its_rooms_now_and_later() -> None:
    side = sender()
    ready(side)
    assert side.peer_lost("d", 1, "silent", dead=True)[0] == Observe("r/0", "transfer", False, "silent")
    assert side.open("s/0", "d", 1, 4) == [
        Observe("s/0", "bootstrap", False, "silent"),
        Observe("s/0", "release", True),
    ]
    side.peer_connected(Peer("d", 2, 0), ONE)
    assert side.open("t/0", "d", 0, 4) == [], "the next incarnation is welcome"


def test_a_room_for_whichever_incarnation_comes_does_not_end_with_the_older_one() -> None:
    side = sender()
    assert side.open("r/0", "d", 0, 4) == [] and side.open("old/0", "d", 1, 4) == []
    actions = side.peer_connected(Peer("d", 2, 0), ONE)
    assert [action.room for action in actions if isinstance(action, Observe)] == ["old/0", "old/0"]
    assert side.on_message(Peer("d", 2, 0), Destinations("r/0", 4, (5,))) == [Observe("r/0", "bootstrap", True)]


def test_what_the_log_says_of_a_room_that_is_gone_does_nothing() -> None:
    side = sender()
    assert side.stop("r/0", "abort") == side.start("r/0", [1]) == side.close("r/0") == []
    other = ReceivingSide(0, ONE)
    assert other.stop("r/0", "abort") == other.send_destinations("r/0", [1]) == other.close("r/0") == []


def test_a_foreign_instance_is_told_that_nothing_will_come() -> None:
    side = sender()
    side.peer_connected(Peer("x", 1, 0), ONE)
    ready(side)
    assert Send(Peer("x", 1, 0), Stopped("r/0")) in side.on_message(Peer("x", 1, 0), Destinations("r/0", 4, (9,)))
    assert side.on_message(Peer("x", 1, 0), Stop("r/0", "")) == [Send(Peer("x", 1, 0), Stopped("r/0"))]
    assert side.rooms()[0].state == "sending" and side.counters.foreign == 2
    assert side.completed(99, None) == [] and side.counters.stray == 1


# ---- the other side


def receiver() -> ReceivingSide:
    side = ReceivingSide(0, ONE)
    assert side.open("r/0", "p", 1, 4) == [NeedPeer("p", 1)]
    assert side.peer_ready("p", 1, ONE) == [Observe("r/0", "prealloc", True)]
    return side


def receiving() -> ReceivingSide:
    side = receiver()
    assert side.send_destinations("r/0", [5]) == [Send(P0, Destinations("r/0", 4, (5,)))]
    return side


def test_a_room_received() -> None:
    side = receiving()
    finished = Finished("r/0", 4, LAYERS, 4 * 2 * 64, 2, b"t")
    assert side.on_message(P0, Slice("r/0", 0, (0, 1), 0, 4)) == []
    assert side.on_message(P0, finished) == [], "what it counts is not all here"
    assert side.on_message(P0, Slice("r/0", 0, (0, 1), 0, 4)) == [], "a repeat counts once"
    assert side.on_message(P0, Slice("r/0", 1, (1, 2), 0, 4)) == [
        Send(P0, FinishedAck("r/0")),
        Observe("r/0", "transfer", True, "", b"t"),
    ]
    assert side.on_message(P0, finished) == [Send(P0, FinishedAck("r/0"))]
    assert side.on_message(P0, Failed("r/0", "too late")) == []
    assert side.stop("r/0", "abort") == [Observe("r/0", "release", True)]
    assert side.close("r/0") == []
    assert side.on_message(P0, finished) == [Send(P0, FinishedAck("r/0"))], "so that the sender may forget it too"


@pytest.mark.parametrize(
    "finished",
    [
        Finished("r/0", 3, LAYERS, 4 * 2 * 64, 1, b"t"),
        Finished("r/0", 4, (0, 1), 4 * 2 * 64, 1, b"t"),
        Finished("r/0", 4, LAYERS, 4 * 2 * 64 - 1, 1, b"t"),
        Finished("r/0", 4, LAYERS, 4 * 2 * 64, 1, None),
    ],
)
def test_finished_must_say_what_the_plan_says(finished: Finished) -> None:
    observed = [action for action in receiving().on_message(P0, finished) if isinstance(action, Observe)]
    assert [(o.topic, o.good) for o in observed] == [("transfer", False), ("release", True)]


def test_a_room_stopped_before_its_pages_were_sent_is_released_at_once_and_sends_none() -> None:
    side = receiver()
    assert side.stop("r/0", "abort") == [Send(P0, Stop("r/0", "abort")), Observe("r/0", "release", True)]
    assert side.send_destinations("r/0", [5]) == []


@pytest.mark.parametrize("fence", [Stopped("r/0"), Finished("r/0", 4, LAYERS, 512, 1, b"t")])
def test_a_stopped_room_is_released_by_either_word_of_its_source(fence: Stopped | Finished) -> None:
    side = receiving()
    assert side.stop("r/0", "abort") == [Send(P0, Stop("r/0", "abort"))]
    assert side.close("r/0") == [] and side.unfenced() == 1
    assert side.on_message(P0, Failed("r/0", "stopped: abort")) == [], "not a fence"
    assert side.peer_reconnected(P0) == [Send(P0, Stop("r/0", "abort"))]
    side.on_message(P0, fence)
    assert side.rooms() == ()


def test_a_lost_peer_is_no_fence_and_a_dead_one_is() -> None:
    side = receiving()
    assert side.peer_lost("p", 1, "silent", dead=False)[0] == Observe("r/0", "transfer", False, "silent")
    assert side.unfenced() == 1
    assert side.peer_lost("p", 1, "reaped", dead=True) == [Observe("r/0", "release", True)]
    assert [a.good for a in side.open("s/0", "p", 1, 4) if isinstance(a, Observe)] == [False, True]
    assert side.open("t/0", "p", 2, 4) == [NeedPeer("p", 2)]


def test_failed_before_the_log_opened_the_room_leaves_a_tombstone() -> None:
    side = ReceivingSide(0, ONE)
    side.peer_ready("p", 1, ONE)
    assert side.on_message(P0, Failed("r/0", "no pages")) == []
    assert side.open("r/0", "p", 1, 4) == [
        Observe("r/0", "prealloc", False, "no pages"),
        Observe("r/0", "release", True),
    ]


def test_a_refused_handshake_fails_who_waits_and_nobody_later() -> None:
    side = ReceivingSide(0, ONE)
    side.open("r/0", "p", 1, 4)
    assert side.peer_refused("p", "model: a here, b there")[0] == Observe(
        "r/0", "prealloc", False, "model: a here, b there"
    )
    assert side.open("s/0", "p", 1, 4) == [NeedPeer("p", 1)]


def test_an_epoch_that_is_gone_fails_its_room() -> None:
    side = ReceivingSide(0, ONE)
    side.open("r/0", "p", 1, 4)
    observed = side.peer_ready("p", 2, ONE)[0]
    assert observed == Observe("r/0", "prealloc", False, "p epoch 1 is gone, epoch 2 answers")
    assert isinstance(side.open("s/0", "p", 1, 4)[0], Observe)


def test_what_a_lost_peer_parked_does_not_take_the_place_of_others() -> None:
    side = SendingSide(0, ONE, True, parked_rooms=2)
    gone, here = Peer("d", 1, 0), Peer("e", 1, 0)
    for peer in (gone, here):
        side.peer_connected(peer, ONE)
    for room in ("a/0", "b/0"):
        assert side.on_message(gone, Destinations(room, 4, (0,))) == []
    assert isinstance(side.on_message(here, Destinations("c/0", 4, (0,)))[0].message, Failed), "full"
    side.peer_lost("d", 1, "killed", dead=True)
    assert side.on_message(here, Destinations("f/0", 4, (0,))) == []
    assert side.open("f/0", "e", 1, 4) == [Observe("f/0", "bootstrap", True)]


@pytest.mark.parametrize(
    "wrong",
    [
        Slice("r/0", 1, (0, 3), 0, 4),
        Slice("r/0", 1, (1, 1), 0, 4),
        Slice("r/0", 1, LAYERS, 2, 2),
        Slice("r/0", 1, LAYERS, 0, 5),
        Slice("r/0", 1, (1, 2), 0, 4, instead_of=0),
    ],
)
def test_a_slice_that_cannot_be_ends_the_room(wrong: Slice) -> None:
    side = receiving()
    assert side.on_message(P0, Slice("r/0", 0, (0, 1), 0, 4)) == []
    (first, *_) = side.on_message(P0, wrong)
    assert isinstance(first, Observe) and not first.good


def test_slices_that_together_are_more_than_the_prompt_end_the_room() -> None:
    side = receiving()
    assert side.on_message(P0, Slice("r/0", 0, (0, 1), 0, 4)) == []
    assert side.on_message(P0, Slice("r/0", 1, (0, 1), 0, 4)) == []
    reason = f"{P0} sent more than 4 positions of layers (0, 2)"
    assert side.on_message(P0, Slice("r/0", 2, (1, 2), 0, 1))[0] == Observe("r/0", "transfer", False, reason)


def checked() -> ReceivingSide:
    side = ReceivingSide(0, ONE, checksums=True)
    side.open("r/0", "p", 1, 4)
    side.peer_ready("p", 1, ONE)
    side.send_destinations("r/0", [5])
    return side


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


def test_under_a_lease_only_its_end_is_a_fence() -> None:
    side = ReceivingSide(0, ONE, leased=True)
    side.open("r/0", "p", 1, 4)
    side.peer_ready("p", 1, ONE)
    assert side.send_destinations("r/0", [5]) == [Grant("r/0", (5,)), Send(P0, Destinations("r/0", 4, (5,)))]
    assert side.stop("r/0", "abort") == [Revoke("r/0"), Send(P0, Stop("r/0", "abort"))]
    assert side.on_message(P0, Stopped("r/0")) == [], "it may say so; its kernel may still hold bytes"
    assert side.peer_lost("p", 1, "reaped", dead=True) == []
    assert side.unfenced() == 1
    assert side.revoked("r/0") == [Observe("r/0", "release", True)]
    assert side.close("r/0") == [] and side.rooms() == ()


def test_the_end_of_a_good_transfer_ends_its_lease() -> None:
    side = ReceivingSide(0, ONE, leased=True)
    side.open("r/0", "p", 1, 4)
    side.peer_ready("p", 1, ONE)
    side.send_destinations("r/0", [5])
    side.on_message(P0, Slice("r/0", 0, LAYERS, 0, 4))
    assert side.on_message(P0, Finished("r/0", 4, LAYERS, 512, 1, b"t"))[-1] == Revoke("r/0")
    assert side.stop("r/0", "abort") == [Observe("r/0", "release", True)]


def test_a_layer_with_a_window_sends_what_the_next_token_still_sees_and_that_is_enough() -> None:
    topology = Topology(ONE.shards, ONE.page_size, ONE.bytes_per_token, (0, 3))
    side = SendingSide(0, topology, True)
    side.peer_connected(D0, topology)
    side.open("r/0", "d", 0, 8)
    side.on_message(D0, Destinations("r/0", 8, (5, 6)))
    side.start("r/0", [3, 4])
    (only,) = submitted(side.written("r/0", 0, 6, LAYERS))
    assert (only.layers, only.runs) == ((0, 1), ((12, 20, 6),)), "layer 1 sends none of these"
    last = submitted(side.written("r/0", 6, 8, LAYERS))
    assert [(one.layers, one.runs) for one in last] == [((0, 2), ((18, 26, 2),))]
    there = ReceivingSide(0, topology)
    there.open("r/0", "p", 1, 8)
    there.peer_ready("p", 1, topology)
    there.send_destinations("r/0", [5, 6])
    for number, (layers, start, end) in enumerate((((0, 1), 0, 6), (LAYERS, 6, 8))):
        there.on_message(P0, Slice("r/0", number, layers, start, end))
    whole = (8 + 2) * BYTES_PER_TOKEN
    assert there.on_message(P0, Finished("r/0", 8, LAYERS, whole, 2, b"t"))[-1] == Observe(
        "r/0", "transfer", True, "", b"t"
    )


def test_slices_that_overlap_do_not_make_up_for_what_is_missing() -> None:
    side = receiving()
    for number, (layers, start, end) in enumerate((((0, 1), 0, 3), ((0, 1), 1, 4), ((1, 2), 0, 2))):
        assert side.on_message(P0, Slice("r/0", number, layers, start, end)) == []
    (failed, *_) = side.on_message(P0, Finished("r/0", 4, LAYERS, 512, 3, b"t"))
    assert failed == Observe("r/0", "transfer", False, f"{P0} sent some positions twice, and others never")


def test_a_damaged_slice_is_repeated_only_once() -> None:
    side = checked()
    side.on_message(P0, Slice("r/0", 0, LAYERS, 0, 4, b"sums"))
    side.verified("r/0", 0, 0, sound=False)
    side.on_message(P0, Slice("r/0", 1, LAYERS, 0, 4, b"sums", instead_of=0))
    (failed, *_) = side.on_message(P0, Slice("r/0", 2, LAYERS, 0, 4, b"sums", instead_of=0))
    assert isinstance(failed, Observe) and not failed.good and "not asked for" in failed.reason
