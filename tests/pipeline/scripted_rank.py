"""Not a test: the rank process that the daemon's tests run, `python -m tests.pipeline.scripted_rank`.

It speaks `pipeline.io.control` and computes nothing. What it does is scripted in two places: the
folder named by `RankConfig.model` may hold `rank<N>.json` (start-up behaviour), and the first prompt
token of a request chooses what happens to that request. What it is told, it writes to `rank<N>.heard`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from consensus.entry import Key, RequestSpec, TokenOut
from pipeline.io import control
from pipeline.outcome import ABORT, LENGTH, Outcome

# First prompt token → what rank 0 does with the request.
ECHO = 1  # the prompt's own tokens come back, then "length"
HANG = 2  # one token, then nothing until cancelled
FLOOD = 3  # max_tokens tokens at once, nothing after
SUICIDE = 4  # rank 0 fails


class Rank:
    def __init__(self, config: control.RankConfig) -> None:
        self.config = config
        self.folder = Path(config.model)
        script = self.folder / f"rank{config.rank}.json"
        self.script: dict[str, Any] = json.loads(script.read_text()) if script.exists() else {}
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, str(config.rank).encode())
        if config.control_key:
            config.keys.dial_key(self.socket, config.control_key)
        self.socket.connect(config.control)
        self.open: set[Key] = set()
        self.alive_due = 0.0

    def say(self, message: control.ToDaemon) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def fail(self, reason: str, diverged: bool = False) -> None:
        self.say(control.Failing(reason, diverged))
        self.socket.close(linger=1000)
        print("failing:", reason)
        sys.exit(3)

    def load(self) -> None:
        self.say(control.Loading(0.5, "weights"))
        if reason := self.script.get("fail_load"):
            self.fail(reason)
        if line := self.script.get("exit_load"):
            print(line)
            sys.exit(5)
        gate = self.folder / "hold"
        while gate.exists():
            time.sleep(0.02)
        self.socket.send(b"\xc1 not msgpack")
        self.socket.send_multipart([b"two", b"frames"])

    def run(self) -> None:
        self.say(control.Capacity(self.script.get("pages", 100 + self.config.rank)))
        decoder = msgspec.msgpack.Decoder(control.ToRank)
        while True:
            if self.socket.poll(200):
                self.handle(decoder.decode(self.socket.recv()))
            if time.monotonic() > self.alive_due:
                stuck = (self.folder / "stuck").exists()
                late = {"stalled": 6.0, "doing": "tick 9 (3 rows) has not returned"} if stuck else {}
                self.say(control.Alive(7, **late))
                self.alive_due = time.monotonic() + 0.5

    def handle(self, message: control.ToRank) -> None:
        with (self.folder / f"rank{self.config.rank}.heard").open("a") as out:
            out.write(f"{self.config.epoch} {message}\n")
        match message:
            case control.Configure():
                self.load()
                address = f"tcp://{self.config.host}:{9000 + self.config.rank}" if self.config.role == "prefill" else ""
                self.say(control.Ready(address, "local"))
            case control.Submit():
                self.submit(message.spec)
            case control.Cancel() if message.key in self.open:
                self.open.discard(message.key)
                self.say(control.Ended(message.key, Outcome(ABORT, message.reason, 1)))
            case control.AskStatus():
                if not self.script.get("mute_status"):
                    self.report(message.token)
            case control.Dump():
                if not self.script.get("mute_dump"):
                    path = self.script.get("dump", f"/dumps/r{self.config.rank}.dump")
                    self.say(control.Dumped(message.token, path, "" if path else "the disk is full"))
            case control.Quit():
                if not self.script.get("ignore_quit"):
                    sys.exit(0)

    def submit(self, spec: RequestSpec) -> None:
        self.open.add(spec.key)
        match spec.prompt[0]:
            case x if x == ECHO:
                for position, token in enumerate(spec.prompt):
                    chosen = (
                        TokenOut(token, -0.5, ((token, -0.5), (9, -1.5)))
                        if spec.params.logprobs >= 0
                        else TokenOut(token)
                    )
                    self.say(control.Tokens(spec.key, position, (chosen,)))
                self.say(control.Ended(spec.key, Outcome(LENGTH, "", len(spec.prompt))))
                self.open.discard(spec.key)
            case x if x == HANG:
                self.say(control.Tokens(spec.key, 0, (TokenOut(5),)))
            case x if x == FLOOD:
                self.say(control.Tokens(spec.key, 0, (TokenOut(5),) * spec.params.max_tokens))
            case x if x == SUICIDE:
                self.fail("digest mismatch at seq 41 in field pages", diverged=True)

    def report(self, token: int) -> None:
        self.say(
            control.StatusReport(
                token, os.getpid(), 7, "abcd", {"waiting": 3}, {"running": len(self.open)}, {"free": 100, "owned": -1},
                0, 0, 0, 0.1, {"tokens_generated": 12}, "", "",
            )
        )  # fmt: skip


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = Rank(msgspec.json.decode(sys.stdin.buffer.read(), type=control.RankConfig))
    rank.run()


if __name__ == "__main__":
    main()
