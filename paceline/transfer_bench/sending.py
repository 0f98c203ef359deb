"""The sender of a pair: the real port, the engine under it alone, and the library by itself.

Out: moments. A prompt through the ports begins when its KV is said to be in the pool (the executor has run it)
and ends at the receiver, when that observes `transfer`; the other two begin with the first call and end here,
when the library says that the bytes have landed.
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Sequence

from transfer.actions import Peer
from transfer.io.sending_port import SendingPort
from transfer.regions import Write

from .library import Library, library_for
from .messages import Answer, Begin, Channel, Direct, Methods, Prefill, Prompt, Question, Target, Timed, Up
from .pool import Pool
from .ports_loop import DEADLINE, PortsLoop, TransferFailed
from .terms import LEASE, PEER_TIMEOUT, RECEIVER, SENDER, engine_for, terms

ENGINE = "engine"


class Sender:
    def __init__(self, begin: Begin, source: Pool, destination: Pool) -> None:
        """`destination` is the receiver's, mapped here too; only its name is used, never its memory."""
        self._begin, self._source = begin, source
        self._engine = engine_for(begin, source)
        topology = begin.shape.topology()
        regions = begin.shape.regions(source.base)
        identity = Peer(SENDER, 1, 0)
        self._port = SendingPort(
            identity, topology, regions, self._engine, terms(begin, self._engine), begin.host, peer_timeout=PEER_TIMEOUT
        )
        self._loop = PortsLoop(self._port)
        self._library: Library | None = None
        self._target = Target(b"", 0)
        self._handles = itertools.count(1 << 40)  # the port's own are small
        self._writes: dict[int, list[Write]] = {}

    def up(self) -> Answer:
        return Up(address=self._port.address)

    def wait(self, channel: Channel) -> None:
        self._loop.idle(channel)

    def answer(self, question: Question) -> Answer:
        match question:
            case Target() as target:
                return self._aim(target)
            case Prompt(room, tokens, chunk):
                return self._prompt(room, tokens, chunk)
            case Prefill():
                return self._prefill(question)
            case Direct(method, tokens):
                return self._direct(method, tokens)
            case _:
                raise AssertionError(question)

    def _aim(self, target: Target) -> Methods:
        self._target = target
        self._engine.connect(LEASE, target.endpoint)
        self._library = library_for(self._begin, self._source, target.endpoint)
        return Methods([ENGINE, *(self._library.methods if self._library else ())])

    def _prompt(self, room: str, tokens: int, chunk: int) -> Timed:
        cpu = time.process_time()
        loop, port, layers = self._loop, self._port, self._begin.shape.layers
        pages = self._begin.shape.source_pages(tokens)
        loop.note(port.open(room, RECEIVER, 0, tokens))
        loop.until(room, "bootstrap")
        began = time.monotonic()
        loop.note(port.start(room, pages))
        for start in range(0, tokens, chunk):
            loop.note(port.written(room, start, min(start + chunk, tokens), (0, layers)))
        loop.note(port.first_token(room, b"token"))
        loop.until(room, "transfer")
        ended = time.monotonic()
        loop.note(port.close(room))
        loop.forget(room)
        return Timed(began, ended, time.process_time() - cpu)

    def _prefill(self, asked: Prefill) -> Timed:
        from .forward import Forward

        cpu = time.process_time()
        loop, port, layers = self._loop, self._port, self._begin.shape.layers
        loop.note(port.open(asked.room, RECEIVER, 0, asked.tokens))
        loop.until(asked.room, "bootstrap")
        loop.note(port.start(asked.room, self._begin.shape.source_pages(asked.tokens)))
        with Forward(layers, asked.tokens, asked.chunk, asked.layer_seconds) as forward:
            while not forward.over:
                loop.turn(forward.fd)
                for start, end, layer in forward.written():
                    if asked.push == "layer":
                        loop.note(port.written(asked.room, start, end, (layer, layer + 1)))
                    elif asked.push == "chunk" and layer == layers - 1:
                        loop.note(port.written(asked.room, start, end, (0, layers)))
        if asked.push == "end":
            loop.note(port.written(asked.room, 0, asked.tokens, (0, layers)))
        loop.note(port.first_token(asked.room, b"token"))
        loop.until(asked.room, "transfer")
        loop.note(port.close(asked.room))
        loop.forget(asked.room)
        return Timed(forward.ended, time.monotonic(), time.process_time() - cpu)

    def _direct(self, method: str, tokens: int) -> Timed:
        if tokens not in self._writes:
            self._writes[tokens] = self._begin.shape.writes(self._source.base, self._target.base, tokens)
        writes = self._writes[tokens]
        if method != ENGINE:
            assert self._library is not None
            self._library.prepare(method, writes)
        cpu, began = time.process_time(), time.monotonic()
        if method == ENGINE:
            self._through_engine(writes)
        else:
            assert self._library is not None
            self._library.move(method, writes)
        return Timed(began, time.monotonic(), time.process_time() - cpu)

    def _through_engine(self, writes: Sequence[Write]) -> None:
        handle = next(self._handles)
        self._engine.submit(handle, LEASE, writes, LEASE)
        poller = select.poll()
        poller.register(self._engine.completion_fd, select.POLLIN)
        while poller.poll(DEADLINE * 1000):
            for completion in self._engine.poll():
                if completion.error is not None:
                    raise TransferFailed(f"engine: {completion.error}")
                if completion.handle == handle:
                    return
        raise TransferFailed(f"the engine did not end a write within {DEADLINE:.0f} s")
