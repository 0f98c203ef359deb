"""One process of a pair: `python -m paceline.transfer_bench.member ROLE CHANNEL SOURCE DESTINATION`.

In: a role, and descriptors of its channel and of both pools. Out: answers; the last one may be `Broken`, with
the reason. It leaves by `_exit`, for a NIXL process may crash in its libraries' own exit handlers.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from typing import Protocol

from transfer.io.engine import EngineError

from .matmul_slot import MatmulSlot
from .messages import Answer, Begin, Broken, Channel, Check, Checked, Closed, Cpu, CpuSeconds, Done, Poison, Question
from .pool import Pool, wrong_writes


class Member(Protocol):
    def up(self) -> Answer: ...
    def wait(self, channel: Channel) -> None:
        """Until there is something to read; do meanwhile what an idle rank does."""

    def answer(self, question: Question) -> Answer: ...


def start(role: str, begin: Begin, source: Pool, destination: Pool) -> Member:
    """The libraries of one role only are imported."""
    if role == "sender":
        from .sending import Sender

        return Sender(begin, source, destination)
    if role == "receiver":
        from .receiving import Receiver

        return Receiver(begin, destination)
    from .reference import Copier, Reader

    return Copier(begin, source, destination) if role == "copier" else Reader(begin, destination)


def serve(role: str, channel: Channel, descriptors: tuple[int, int]) -> None:
    begin = channel.receive()
    assert isinstance(begin, Begin)
    shape = begin.shape
    source, destination = (Pool(descriptor, shape.pool_bytes) for descriptor in descriptors)
    try:
        member = start(role, begin, source, destination)
    except EngineError as error:
        channel.send(Broken(str(error), missing=True))
        return
    channel.send(member.up())
    compute = MatmulSlot()
    while True:
        member.wait(channel)
        match channel.receive():
            case Poison():
                destination.poison()
                channel.send(Done())
            case Check(tokens, in_one_piece):
                writes = shape.writes(source.base, destination.base, tokens)
                if in_one_piece:
                    writes = [(source.base, destination.base, shape.prompt_bytes(tokens))]
                channel.send(Checked(wrong_writes(source, destination, writes)))
            case Cpu():
                channel.send(CpuSeconds(time.process_time()))
            case question:
                assert isinstance(question, Question), question
                channel.send(compute.answer(question) or member.answer(question))


def main(role: str, channel_fd: int, source_fd: int, destination_fd: int) -> int:
    channel = Channel(socket.socket(fileno=channel_fd))
    try:
        serve(role, channel, (source_fd, destination_fd))
    except Closed:
        return 0  # the command is done with us
    except BaseException as error:
        traceback.print_exc()
        channel.send(Broken(f"{type(error).__name__}: {error}"[:2000]))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], *map(int, sys.argv[2:5]))
    sys.stderr.flush()
    os._exit(code)
