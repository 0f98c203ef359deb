"""The loop around one port, as a rank runs it, until an observation comes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from transfer.actions import NeedPeer, Observe
from transfer.io.receiving_port import ReceivingPort
from transfer.io.sending_port import SendingPort

from .messages import Channel

TICK = 1.0
DEADLINE = 60.0  # a prompt takes a second at most; a peer that is silent is noticed by then


class TransferFailed(Exception):
    """The product itself said that a transfer failed, or did not end."""


class PortsLoop:
    def __init__(self, port: SendingPort | ReceivingPort) -> None:
        self._port = port
        self._poller = zmq.Poller()
        self._ticked = 0.0
        self._seen: dict[tuple[str, str], Observe] = {}

    def note(self, observed: Sequence[Observe | NeedPeer]) -> None:
        for one in observed:
            assert isinstance(one, Observe), one
            self._seen[one.room, one.topic] = one

    def until(self, room: str, topic: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while (seen := self._seen.get((room, topic))) is None:
            failed = [one for one in self._seen.values() if one.room == room and not one.good]
            if failed:
                raise TransferFailed(f"{failed[0].topic} of {room} failed: {failed[0].reason}")
            if time.monotonic() > deadline:
                raise TransferFailed(f"no {topic} of {room} within {DEADLINE:.0f} s")
            self._turn()
        if not seen.good:
            raise TransferFailed(f"{topic} of {room} failed: {seen.reason}")

    def idle(self, channel: Channel) -> None:
        """Until the channel is readable."""
        while not self.turn(channel.socket.fileno()):
            pass

    def turn(self, descriptor: int) -> bool:
        """Sleep once, until the port has something to do or the descriptor is readable; whether that was it."""
        self._poller.register(descriptor, zmq.POLLIN)
        try:
            return descriptor in self._turn()
        finally:
            self._poller.unregister(descriptor)

    def forget(self, room: str) -> None:
        for key in [key for key in self._seen if key[0] == room]:
            del self._seen[key]

    def _turn(self) -> dict[object, int]:
        self._port.register(self._poller)
        left = max(0.0, self._ticked + TICK - time.monotonic())
        ready: dict[object, int] = dict(self._poller.poll(int(left * 1000) + 1))
        self.note(self._port.on_readable())
        if time.monotonic() - self._ticked >= TICK:
            self._ticked = time.monotonic()
            self.note(self._port.tick())
        return ready
