"""A room opens for who shows its token; what anyone else says of it changes nothing."""

from __future__ import annotations

import pytest

from consensus.entry import Key, PeerRef, RequestSpec, SamplingParams
from pipeline.effects import OpenRoom
from tests.transfer.pools import pipeline
from transfer.actions import NeedPeer, Observe, Peer, Send
from transfer.messages import Destinations, Failed, Message, Stop, Stopped
from transfer.receiver import ReceivingSide
from transfer.sender import SendingSide

OURS, FORGED = b"0123456789abcdef", b"fedcba9876543210"
TOPOLOGY = pipeline(1, 2, 4, 64)
D0, P0 = Peer("d", 1, 0), Peer("p", 1, 0)
READY = [Observe("r/0", "bootstrap", True)]


def sender() -> SendingSide:
    side = SendingSide(0, TOPOLOGY, True)
    side.peer_connected(D0, TOPOLOGY)
    return side


def opened(token: bytes = OURS) -> SendingSide:
    side = sender()
    assert side.open("r/0", "d", 1, 4, token) == []
    return side


def forged(side: SendingSide) -> list[Message]:
    said: list[Message] = []
    for message in (Destinations("r/0", 4, (9,), FORGED), Destinations("r/0", 4, (9,)), Stop("r/0", "die", FORGED)):
        actions = side.on_message(D0, message)
        assert all(isinstance(action, Send) for action in actions), actions
        said += [action.message for action in actions if isinstance(action, Send)]
    return said


def test_the_decode_side_shows_the_token_it_was_given() -> None:
    side = ReceivingSide(0, TOPOLOGY)
    assert side.open("r/0", "p", 1, 4, OURS) == [NeedPeer("p", 1)]
    side.peer_ready("p", 1, TOPOLOGY)
    assert side.send_destinations("r/0", [5]) == [Send(P0, Destinations("r/0", 4, (5,), OURS))]
    assert side.stop("r/0", "abort") == [Send(P0, Stop("r/0", "abort", OURS))]


def test_another_token_opens_and_stops_nothing_and_is_counted() -> None:
    side = opened()
    assert [type(message) for message in forged(side)] == [Failed, Stopped, Failed, Stopped, Stopped]
    assert side.counters.unauthorized == 3
    assert side.on_message(D0, Destinations("r/0", 4, (5,), OURS)) == READY


def test_a_room_that_is_open_takes_no_notice() -> None:
    side = opened()
    assert side.on_message(D0, Destinations("r/0", 4, (5,), OURS)) == READY
    assert forged(side) == [], "not a word: it would be a fence that nobody asked for"
    assert [room.state for room in side.rooms()] == ["ready"]
    assert Send(D0, Stopped("r/0")) in side.on_message(D0, Stop("r/0", "abort", OURS))


@pytest.mark.parametrize("message", [Destinations("r/0", 4, (9,), FORGED), Stop("r/0", "die", FORGED)])
@pytest.mark.parametrize("first", [True, False])
def test_what_is_forged_before_the_log_opens_the_room_does_not_count(message: Message, first: bool) -> None:
    side = sender()
    genuine = Destinations("r/0", 4, (5,), OURS)
    other = Peer("d", 1, 0) if isinstance(message, Stop) else Peer("elsewhere", 1, 0)
    for peer, said in [(other, message), (D0, genuine)][:: 1 if first else -1]:
        side.on_message(peer, said)  # type: ignore[arg-type]
    actions = side.open("r/0", "d", 1, 4, OURS)
    assert [action for action in actions if isinstance(action, Observe)] == READY


def test_a_stop_that_overtakes_the_log_counts_with_its_token() -> None:
    side = sender()
    assert side.on_message(D0, Stop("r/0", "abort", OURS)) == [Send(D0, Stopped("r/0"))]
    actions = side.open("r/0", "d", 1, 4, OURS)
    assert Observe("r/0", "bootstrap", False, "stopped: abort") in actions


def test_a_token_is_in_no_text() -> None:
    spec = RequestSpec(Key("r", 0), (1,), SamplingParams(4), PeerRef("p", "a", 1), 9, token=OURS)
    shown = repr(spec) + repr(OpenRoom(spec.key, spec.peer, 1, OURS))
    assert "0123456789" not in shown and "resumed=0" in shown
