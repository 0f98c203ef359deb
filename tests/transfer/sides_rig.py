"""Both sides of a transfer, brought to where a test begins."""

from __future__ import annotations

from collections.abc import Sequence

from tests.transfer.pools import pipeline
from transfer.actions import NeedPeer, Observe, Peer, Send, Submit
from transfer.messages import Destinations
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


def receiver() -> ReceivingSide:
    side = ReceivingSide(0, ONE)
    assert side.open("r/0", "p", 1, 4) == [NeedPeer("p", 1)]
    assert side.peer_ready("p", 1, ONE) == [Observe("r/0", "prealloc", True)]
    return side


def receiving() -> ReceivingSide:
    side = receiver()
    assert side.send_destinations("r/0", [5]) == [Send(P0, Destinations("r/0", 4, (5,)))]
    return side


def checked() -> ReceivingSide:
    side = ReceivingSide(0, ONE, checksums=True)
    side.open("r/0", "p", 1, 4)
    side.peer_ready("p", 1, ONE)
    side.send_destinations("r/0", [5])
    return side
