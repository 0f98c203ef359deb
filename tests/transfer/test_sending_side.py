"""The sending side in the cases that chance seldom reaches."""

from __future__ import annotations

import pytest

from tests.transfer.sides_rig import D0, D1, LAYERS, ONE, ready, sender, submitted
from transfer import receiving_room, sending_room
from transfer.actions import Observe, Peer, Send, Submit
from transfer.messages import Destinations, Failed, Finished, FinishedAck, Slice, Stop, Stopped
from transfer.receiver import ReceivingSide


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
