"""The receiving side in the cases that chance seldom reaches."""

from __future__ import annotations

import pytest

from tests.transfer.pools import BYTES_PER_TOKEN
from tests.transfer.sides_rig import D0, LAYERS, ONE, P0, receiver, receiving, submitted
from transfer.actions import Grant, NeedPeer, Observe, Peer, Revoke, Send
from transfer.messages import Destinations, Failed, Finished, FinishedAck, Slice, Stop, Stopped
from transfer.plan import Topology
from transfer.receiver import ReceivingSide
from transfer.sender import SendingSide


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
