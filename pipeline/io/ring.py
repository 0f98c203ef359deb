"""The sockets between the ranks of one instance: relay, return and report channels.

Every channel is a ZMQ PUSH/PULL pair, FIFO, with msgpack frames of one typed union. Nothing blocks:
what cannot be sent now waits in an outbox that the poller drains, and what does not decode or belongs
to another epoch is dropped and counted. Every socket is encrypted and every message comes with the rank
whose key sent it (`pipeline.io.zap`). Frames are numbered per sender: a reconnect can lose what was on its
way, and a lost relay, acknowledgement or bell would leave the ranks waiting for ever, so a hole is fatal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec
import zmq

from consensus.entry import Ballot, Entry, Return, Trailer
from consensus.progress import Progress
from consensus.store import Update
from consensus.votes import Bell
from pipeline.io.zap import RingKeys

MAX_FRAME = 64 << 20  # an entry of 64 prompts of 100k tokens stays below it
BURST = 256  # frames read from one channel before others get their turn


class RelayFrame(msgspec.Struct, frozen=True, array_like=True):
    """Rank k → k+1."""

    entry: Entry
    trailer: Trailer


class AckFrame(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """Last rank → rank 0: applied up to `seq`, and the merged votes of entry `seq`."""

    epoch: int
    seq: int
    ballots: tuple[Ballot, ...]


class ReturnFrame(msgspec.Struct, frozen=True, array_like=True, tag="tick"):
    """Last rank → rank 0: the sampler's result of a tick."""

    epoch: int
    item: Return


class UpdateFrame(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Any rank → rank 0: a change of its PPConsensusStore map."""

    epoch: int
    item: Update


class BellFrame(msgspec.Struct, frozen=True, array_like=True, tag="bell"):
    """Any rank → rank 0: it could vote on a key now."""

    epoch: int
    item: Bell


class ProgressFrame(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Any rank → rank 0, once a second while its executor is busy."""

    epoch: int
    item: Progress


BackFrame = AckFrame | ReturnFrame
ReportFrame = UpdateFrame | BellFrame | ProgressFrame
T = TypeVar("T")


_NUMBER = 8  # bytes before the body, big-endian


class FramesLost(Exception):
    """A sender's frames have a hole; the ring cannot go on from what is left."""


class Outbox:
    """The sending end of a channel. `limit` frames may wait; beyond it the ring itself is broken."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: RingKeys, reader: int, limit: int = 10_000
    ) -> None:
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.LINGER, 0)
        keys.dial(self.socket, reader)
        self.socket.connect(endpoint)
        self._waiting: deque[bytes] = deque()
        self._limit = limit
        self._sent = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, frame: msgspec.Struct) -> None:
        """Queues a frame and sends what goes. Raises `OverflowError` when the reader has stopped reading."""
        if len(self._waiting) >= self._limit:
            raise OverflowError(f"{self._limit} frames wait for a rank that does not read")
        self._sent += 1
        self._waiting.append(self._sent.to_bytes(_NUMBER, "big") + self._encode(frame))
        self.flush()

    def flush(self) -> None:
        while self._waiting:
            try:
                self.socket.send(self._waiting[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._waiting.popleft()


class Inbox(Generic[T]):
    """The receiving end of a channel; `dropped` counts frames that do not decode or are not their sender's."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: RingKeys, kind: object) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        keys.serve(self.socket)
        self.socket.bind(endpoint)
        self.dropped = 0
        self._heard: dict[int, int] = {}  # sender → number of its last frame
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def receive(self) -> Iterator[tuple[int, T]]:
        """What has arrived, at most `BURST` frames, each with the rank that sent it. Raises `FramesLost`."""
        for _ in range(BURST):
            try:
                data = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                frame: T = self._decode(data.buffer[_NUMBER:])
            except msgspec.DecodeError:
                self.dropped += 1
                continue
            sender, number = int(data.get("User-Id")), int.from_bytes(data.buffer[:_NUMBER], "big")
            expected = self._heard.get(sender, 0) + 1
            if number != expected:
                raise FramesLost(f"frame {expected} of rank {sender} was lost: frame {number} came")
            self._heard[sender] = number
            yield sender, frame
