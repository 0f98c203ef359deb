"""The ring's sockets: only ranks of the instance are heard, each under its own number; garbage is counted."""

from __future__ import annotations

import socket as plain
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from consensus.entry import Key, StageKey
from consensus.votes import Bell
from pipeline.io.ring import AckFrame, BackFrame, BellFrame, FramesLost, Inbox, Outbox, ReportFrame
from pipeline.io.zap import RingKeys, make_keys
from security.gatekeeper import Gatekeeper

PATIENCE = 10.0


class Hub:
    """Rank 0's end: a gatekeeper and one inbox, pumped by hand as the control loop does."""

    def __init__(self, folder: Path, keys: list[RingKeys]) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = f"ipc://{folder}/in"
        self.gatekeeper = Gatekeeper(self.context, keys[0].ranks)
        self.inbox: Inbox[ReportFrame] = Inbox(self.context, self.endpoint, keys[0], ReportFrame)

    def pump(self, until: object = None, seconds: float = PATIENCE) -> list[tuple[int, ReportFrame]]:
        """What arrives until `until()` or for `seconds`."""
        heard: list[tuple[int, ReportFrame]] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (callable(until) and until(heard)):
            poller = zmq.Poller()
            poller.register(self.gatekeeper.socket, zmq.POLLIN)
            poller.register(self.inbox.socket, zmq.POLLIN)
            poller.poll(20)
            self.gatekeeper.answer()
            heard += self.inbox.receive()
        return heard


@pytest.fixture
def keys() -> list[RingKeys]:
    return make_keys(3)


@pytest.fixture
def hub(tmp_path: Path, keys: list[RingKeys]) -> Iterator[Hub]:
    made = Hub(tmp_path, keys)
    yield made
    made.context.destroy(linger=0)


def bell(rank: int) -> BellFrame:
    return BellFrame(1, Bell(rank, "transfer", StageKey(Key("r", 0), 5), True))


def test_a_message_comes_with_the_rank_of_its_key_whatever_it_says(hub: Hub, keys: list[RingKeys]) -> None:
    outbox = Outbox(hub.context, hub.endpoint, keys[2], 0)
    outbox.send(bell(1))  # rank 2 pretends to be rank 1
    ((sender, frame),) = hub.pump(lambda heard: heard)
    assert sender == 2 and frame.item.rank == 1, "the driver drops it: the two differ"


def test_a_stranger_and_an_unencrypted_peer_are_not_heard(hub: Hub, keys: list[RingKeys]) -> None:
    stranger = make_keys(1)[0]
    forged = RingKeys(stranger.public, stranger.secret, keys[0].ranks)
    outboxes = [Outbox(hub.context, hub.endpoint, who, 0) for who in (forged, keys[1])]
    for outbox in outboxes:
        outbox.send(bell(1))
    naked = hub.context.socket(zmq.PUSH)
    naked.setsockopt(zmq.LINGER, 0)
    naked.connect(hub.endpoint)
    naked.send(msgspec.msgpack.encode(bell(1)))
    heard = hub.pump(lambda heard: heard and hub.gatekeeper.refused, 5)
    assert [sender for sender, _ in heard] == [1] and hub.gatekeeper.refused >= 1


def test_bytes_that_are_no_frame_are_dropped_and_counted(hub: Hub, keys: list[RingKeys]) -> None:
    socket = hub.context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    keys[1].dial(socket, 0)
    socket.connect(hub.endpoint)
    wrong = [b"", b"\xc1", b"\xff" * 100, msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode(["bell", 1])]
    wrong.append(msgspec.msgpack.encode(AckFrame(1, 5, ())))  # another channel's frame
    for data in wrong:
        socket.send(bytes(8) + data)
    socket.send(b"short")
    socket.send_multipart([b"the first", b"part is as bad as the second"])
    socket.send((1).to_bytes(8, "big") + msgspec.msgpack.encode(bell(1)))
    heard = hub.pump(lambda heard: heard)
    assert [sender for sender, _ in heard] == [1]
    assert hub.inbox.dropped == len(wrong) + 3
    raw = plain.socket(plain.AF_UNIX)
    raw.connect(hub.endpoint.removeprefix("ipc://"))
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\x00\xff" * 1000)
    assert hub.pump(seconds=0.3) == []
    raw.close()


def test_a_lost_frame_is_noticed_and_fatal(hub: Hub, keys: list[RingKeys]) -> None:
    socket = hub.context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    keys[1].dial(socket, 0)
    socket.connect(hub.endpoint)
    for number in (1, 3):
        socket.send(number.to_bytes(8, "big") + msgspec.msgpack.encode(bell(1)))
    with pytest.raises(FramesLost, match="frame 2 of rank 1 was lost: frame 3 came"):
        hub.pump()


def test_a_reader_that_does_not_read_fills_a_bounded_outbox(tmp_path: Path, keys: list[RingKeys]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = Outbox(context, f"ipc://{tmp_path}/nobody", keys[1], 0, limit=5)

    def flood() -> None:
        for _ in range(5000):  # the socket's own bound comes first
            outbox.send(bell(1))

    with pytest.raises(OverflowError, match="5 frames wait for a rank that does not read"):
        flood()
    assert len(outbox) == 5
    context.destroy(linger=0)


def test_every_frame_of_a_channel_reads_back(keys: list[RingKeys]) -> None:
    decoder = msgspec.msgpack.Decoder(BackFrame)
    frame = AckFrame(3, 9, ())
    assert decoder.decode(msgspec.msgpack.encode(frame)) == frame
