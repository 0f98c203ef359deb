"""The loop of a rank process, as a rank's control loop runs its port.

In: a command per line, a JSON list. Out, one JSON object per line: `{"seen": …}` for what the rank
observed, `{"status": …}` twice a second, the first one when it is ready. The end of its input ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import zmq

TICK, STATUS = 0.25, 0.5


@dataclass(frozen=True, slots=True)
class Seen:
    room: str
    topic: str
    good: bool
    reason: str
    exact: bool = False  # decode's transfer: byte for byte


class Rank(Protocol):
    def register(self, poller: zmq.Poller) -> None: ...
    def perform(self, command: list[Any]) -> list[Seen]: ...
    def on_readable(self) -> list[Seen]: ...
    def tick(self) -> list[Seen]: ...
    def status(self) -> dict[str, object]: ...
    def close(self) -> None: ...


def serve(rank: Rank) -> None:
    poller = zmq.Poller()
    commands = sys.stdin.fileno()
    poller.register(commands, zmq.POLLIN)
    ticked = told = float("-inf")
    pending = b""
    slowest = 0.0  # the longest that the loop was away from its poll
    while True:
        rank.register(poller)
        ready = dict(poller.poll(TICK * 1000))
        woken = time.monotonic()
        seen = rank.on_readable()
        if commands in ready:
            data = os.read(commands, 1 << 16)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                seen += rank.perform(json.loads(line))
        if woken - ticked > TICK:
            ticked = woken
            seen += rank.tick()
        slowest = max(slowest, time.monotonic() - woken)
        for one in seen:
            print(json.dumps({"seen": asdict(one)}), flush=True)
        if woken - told > STATUS:
            told = woken
            print(json.dumps({"status": {**rank.status(), "slowest": slowest}}), flush=True)
    rank.close()
