"""The daemon's end of the control channel: a ZMQ ROUTER read by the event loop, never polled.

In: frames from ranks, each from a peer whose identity is its rank in decimal and, on a locked socket, whose key is
that rank's. Out: decoded messages with their rank, to one callback. Invariants: whatever does not decode, or
comes from anyone who is not one of our ranks, is dropped and counted; sending never blocks, and a message that
cannot go out is reported to the caller, never lost silently.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import zmq

from pipeline.io.control import HIGH_WATER, LARGEST_FRAME, ToDaemon, ToRank
from pipeline.io.zap import lock
from security.gatekeeper import Gatekeeper

log = logging.getLogger(__name__)

_PER_WAKE_UP = 256  # messages handled before other work of the loop gets its turn


@dataclass(frozen=True, slots=True)
class Lock:
    """Who may speak on a socket that others can reach."""

    secret: str  # of the daemon's end
    ranks: tuple[str, ...]  # public keys in rank order


class ControlSocket:
    def __init__(
        self, endpoint: str, ranks: Iterable[int], outbox: int, on_message: Callable[[int, ToDaemon], None],
        locked: Lock | None = None,
    ) -> None:  # fmt: skip
        """Raises `OSError` if it cannot be bound."""
        self.dropped: Counter[str] = Counter()
        self.ranks = tuple(ranks)
        self._identities = {str(rank).encode(): rank for rank in self.ranks}
        self._decoder: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        # A context of its own: a gatekeeper answers for all sockets of one.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error, not silence, for a rank that is not there
        self._socket.setsockopt(zmq.SNDHWM, outbox)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME)
        self._gatekeeper: Gatekeeper | None = None
        if locked is not None:
            self._gatekeeper = Gatekeeper(self._context, locked.ranks)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank that had to dial again takes its place back
            lock(self._socket, locked.secret)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"the control channel cannot listen on {endpoint}: {error}") from error
        self._gate_fd = -1
        if self._gatekeeper is not None:
            self._gate_fd = int(self._gatekeeper.socket.getsockopt(zmq.FD))
            self._loop.add_reader(self._gate_fd, self._gatekeeper.answer)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._closed = False

    def send(self, rank: int, message: ToRank) -> bool:
        """False: the rank has not dialled in, is gone, or does not read."""
        if self._closed:
            return False
        try:
            self._socket.send_multipart([str(rank).encode(), self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # EAGAIN: its queue is full; EHOSTUNREACH: nobody there
            log.debug("control message to rank %d not sent: %s", rank, error)
            return False
        finally:
            # The descriptor is edge-triggered, and sending may swallow the edge of an arrival.
            if not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._loop.call_soon(self._drain)
        return True

    def drain_now(self) -> None:
        """Handles everything that has already arrived."""
        while self._drain(reschedule=False):
            pass

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            if self._gate_fd >= 0:
                self._loop.remove_reader(self._gate_fd)
            self._context.destroy(linger=0)

    def _drain(self, reschedule: bool = True) -> bool:
        """Handles up to `_PER_WAKE_UP` messages; True: more may wait."""
        more = not self._closed
        try:
            for _ in range(_PER_WAKE_UP):
                if self._closed:
                    return False
                try:
                    frames = self._receive()
                except zmq.Again:
                    more = False
                    return False
                self._handle(frames)
            return True
        finally:  # also when a handler failed: without another edge, nobody would look again
            if more and reschedule:
                self._loop.call_soon(self._drain)

    def _receive(self) -> list[bytes]:
        if self._gatekeeper is None:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        frames = [part.bytes for part in parts]
        # Whoever claims another rank's name is none of ours.
        return frames if frames[0] == str(parts[-1].get("User-Id")).encode() else [b"", *frames[1:]]

    def _handle(self, frames: list[bytes]) -> None:
        rank = self._identities.get(frames[0])
        if rank is None:
            self._drop("not one of our ranks")
            return
        if len(frames) != 2:
            self._drop("not one frame")
            return
        try:
            message = self._decoder.decode(frames[1])
        except (ValueError, RecursionError):
            self._drop("does not decode")
            return
        self._on_message(rank, message)

    def _drop(self, why: str) -> None:
        self.dropped[why] += 1
        if self.dropped[why] == 1:
            log.warning("dropped a control frame: %s (further ones are only counted)", why)
