"""The receiver of a pair: the real port. It knows when a prompt has arrived, and that moment is the end."""

from __future__ import annotations

import time

from transfer.actions import Peer
from transfer.io.engine import LeasingEngine
from transfer.io.receiving_port import ReceivingPort

from .messages import Answer, Begin, Channel, Prefill, Prompt, Question, Timed, Up
from .pool import Pool
from .ports_loop import PortsLoop
from .terms import LEASE, PEER_TIMEOUT, RECEIVER, SENDER, engine_for, terms


class Receiver:
    def __init__(self, begin: Begin, destination: Pool) -> None:
        self._shape, self._pool = begin.shape, destination
        self._engine = engine_for(begin, destination)
        identity = Peer(RECEIVER, 1, 0)
        regions = begin.shape.regions(destination.base)
        self._port = ReceivingPort(
            identity,
            begin.shape.topology(),
            regions,
            self._engine,
            terms(begin, self._engine),
            begin.host,
            PEER_TIMEOUT,
        )
        self._loop = PortsLoop(self._port)
        self._loop.note(self._port.introduce(SENDER, [begin.address]))
        if isinstance(self._engine, LeasingEngine):
            self._engine.grant(LEASE, [(destination.base, destination.nbytes)])

    def up(self) -> Answer:
        return Up(endpoint=self._engine.endpoint(), base=self._pool.base)

    def wait(self, channel: Channel) -> None:
        self._loop.idle(channel)

    def answer(self, question: Question) -> Answer:
        assert isinstance(question, Prompt | Prefill), question
        cpu = time.process_time()
        loop, port, room = self._loop, self._port, question.room
        loop.note(port.open(room, SENDER, 0, question.tokens))
        loop.until(room, "prealloc")
        loop.note(port.send_destinations(room, self._shape.destination_pages(question.tokens)))
        loop.until(room, "transfer")
        ended = time.monotonic()
        loop.note(port.close(room))
        loop.forget(room)
        return Timed(0.0, ended, time.process_time() - cpu)
