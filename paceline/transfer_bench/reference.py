"""What the machine does without any transfer library: copies, and one TCP connection.

`memcpy` copies the prompt's writes inside one process, on one thread. `shm` copies them into the memory of the
other process and tells it with one byte. `tcp` sends as many bytes in one piece over one connection, straight
from the pool into the pool. All but memcpy end when the receiver knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import time

from transfer.regions import Write

from .messages import Answer, Begin, Channel, Direct, Methods, Question, Target, Timed, Up
from .pool import Pool
from .ports_loop import DEADLINE

METHODS = ["memcpy", "shm", "tcp"]


class Copier:
    def __init__(self, begin: Begin, source: Pool, destination: Pool) -> None:
        self._shape, self._source, self._destination = begin.shape, source, destination
        # The same kind of memory as the pools: numpy's own would lie in huge pages, and copy at another speed.
        self._private = Pool.create("bench-private", source.nbytes)
        self._private.poison()
        self._host = begin.host
        self._listener = socket.create_server((begin.host, 0), family=_family(begin.host))
        self._peer: socket.socket | None = None
        self._writes: dict[tuple[str, int], list[Write]] = {}

    def up(self) -> Answer:
        return Up(address=f"{self._host} {self._listener.getsockname()[1]}")

    def wait(self, channel: Channel) -> None:
        select.select([channel.socket], [], [])

    def answer(self, question: Question) -> Answer:
        if isinstance(question, Target):
            self._listener.settimeout(DEADLINE)
            self._peer = self._listener.accept()[0]
            self._peer.settimeout(DEADLINE)
            self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Methods(METHODS)
        assert isinstance(question, Direct) and self._peer is not None, question
        writes = self._listed(question)
        cpu, began = time.process_time(), time.monotonic()
        if question.method == "tcp":
            left = self._source.view[: self._shape.prompt_bytes(question.tokens)]
            while left:
                left = left[self._peer.sendmsg([left]) :]
        else:
            for src, dst, nbytes in writes:
                ctypes.memmove(dst, src, nbytes)
            if question.method == "shm":
                self._peer.send(b"!")
        return Timed(began, time.monotonic(), time.process_time() - cpu)

    def _listed(self, question: Direct) -> list[Write]:
        key = question.method, question.tokens
        if key not in self._writes:
            base = self._destination.base if question.method == "shm" else self._private.base
            self._writes[key] = self._shape.writes(self._source.base, base, question.tokens)
        return self._writes[key]


class Reader:
    def __init__(self, begin: Begin, destination: Pool) -> None:
        self._shape, self._destination = begin.shape, destination
        host, port = begin.address.split()
        self._peer = socket.create_connection((host, int(port)), timeout=DEADLINE)

    def up(self) -> Answer:
        return Up()

    def wait(self, channel: Channel) -> None:
        select.select([channel.socket], [], [])

    def answer(self, question: Question) -> Answer:
        assert isinstance(question, Direct), question
        cpu = time.process_time()
        if question.method == "shm":
            self._peer.recv(1)
        elif question.method == "tcp":
            left = self._destination.view[: self._shape.prompt_bytes(question.tokens)]
            while left:
                count = self._peer.recv_into(left)
                if count == 0:
                    raise ConnectionError("the copier closed the connection")
                left = left[count:]
        return Timed(0.0, time.monotonic(), time.process_time() - cpu)


def _family(host: str) -> socket.AddressFamily:
    with contextlib.suppress(OSError):
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.AF_INET
