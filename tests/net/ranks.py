"""The test's end of the rank processes of a lab: it plays both logs and awaits what the ranks observe."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.net.content import PAGES
from tests.net.lab import Lab
from tests.net.prefill_process import BOOTSTRAP_PORT
from tests.net.serve import Seen

ROOT = Path(__file__).parents[2]
START = 60.0  # seconds for a process to come up
RECENT = 20  # observations in a story
STAGE_TIMEOUT = 30.0  # `--stage-timeout`, by which the log ends a hand-over


class RankProcess:
    def __init__(self, cast: Cast, host: str, epoch: int, module: str, *arguments: str) -> None:
        self.host, self.address = host, cast.lab.addresses[host]
        self.epoch = epoch
        self.seen: dict[tuple[str, str], Seen] = {}
        self.status: dict[str, Any] = {}
        self.statuses = 0
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
        command = [sys.executable, "-m", f"tests.net.{module}", *arguments]
        with (cast.logs / f"{host}-{len(cast.ranks)}.log").open("w") as log:
            self.process = cast.lab.start(host, command, environment, log)
        threading.Thread(target=self._read, args=(cast.lines,), daemon=True).start()

    def say(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, line: str) -> None:
        match json.loads(line):
            case {"seen": seen}:
                one = Seen(**seen)
                assert (one.room, one.topic) not in self.seen, f"{one} told twice"
                self.seen[one.room, one.topic] = one
            case {"status": status}:
                self.status = status
                self.statuses += 1

    def told(self, room: str, topic: str) -> bool:
        return (room, topic) in self.seen

    def good(self, room: str, topic: str) -> bool:
        return self.told(room, topic) and self.seen[room, topic].good

    def of(self, room: str) -> list[Seen]:
        return [seen for (other, _), seen in self.seen.items() if other == room]

    def over(self, room: str) -> bool:
        """The hand-over has ended, well or badly."""
        return self.told(room, "transfer") or any(not seen.good for seen in self.of(room))

    def released(self, room: str) -> bool:
        """Nothing touches its pages any more. After a good end that goes without saying."""
        return self.told(room, "release") or self.good(room, "transfer")

    def reap(self) -> None:
        """As its daemon does before it starts the next incarnation."""
        self.process.kill()
        self.process.wait()

    def _read(self, lines: queue.SimpleQueue[tuple[RankProcess, str]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.put((self, line))


class Cast:
    """All rank processes of one test."""

    def __init__(self, lab: Lab, backend: str, logs: Path) -> None:
        self.lab, self.backend, self.logs = lab, backend, logs
        self.lines: queue.SimpleQueue[tuple[RankProcess, str]] = queue.SimpleQueue()
        self.ranks: list[RankProcess] = []
        self._page = 0

    def prefill(self, host: str = "prefill", epoch: int = 1) -> RankProcess:
        return self._start(host, epoch, "prefill_process", self.backend, self.lab.addresses[host], str(epoch))

    def decode(self, host: str = "decode") -> RankProcess:
        return self._start(host, 1, "decode_process", self.backend, self.lab.addresses[host], host)

    def wait(self, until: Callable[[], object], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            left = end - time.monotonic()
            assert left > 0, f"not within {seconds} s\n{self.story()}"
            for rank in self.ranks:
                assert rank.process.poll() in (None, -9), f"{rank.host} died\n{self.story()}"
            try:
                rank, line = self.lines.get(timeout=min(left, 0.2))
            except queue.Empty:
                continue
            rank.hear(line)

    def story(self) -> str:
        """What a failing test shows."""
        parts = []
        for rank in self.ranks:
            parts += [f"{rank.host}: {rank.status}", *(f"    {seen}" for seen in list(rank.seen.values())[-RECENT:])]
        for log in sorted(self.logs.glob("*.log")):
            parts += [f"{log.name}:", *(f"    {line}" for line in log.read_text().splitlines()[-30:])]
        return "\n".join(parts)

    def idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > until, seconds + 10.0)

    # ---- hand-overs

    def begin(
        self, prefill: RankProcess, decode: RankProcess, room: str, source: Sequence[int], target: Sequence[int]
    ) -> None:
        prefill.say("open", room, decode.host, list(source))
        decode.say("open", room, f"{prefill.address}:{BOOTSTRAP_PORT}", prefill.epoch, list(target))

    def conclude(self, prefill: RankProcess, decode: RankProcess, room: str, seconds: float) -> bool:
        """Until it is over on both sides and nothing touches its pages any more: did it arrive?

        As both logs do, a side that has not heard of the end by `STAGE_TIMEOUT` stops the room itself."""
        deadline = time.monotonic() + STAGE_TIMEOUT
        self.wait(lambda: (prefill.over(room) and decode.over(room)) or time.monotonic() > deadline, seconds)
        for rank in (prefill, decode):
            if not rank.over(room):
                rank.say("stop", room)
        self.wait(lambda: prefill.released(room) and decode.released(room), seconds)
        for rank in (prefill, decode):
            for seen in rank.of(room):
                assert seen.good or seen.reason, f"{seen} without a reason\n{self.story()}"
        arrived = decode.good(room, "transfer")
        assert not arrived or decode.seen[room, "transfer"].exact, f"{room} arrived damaged\n{self.story()}"
        for rank in (prefill, decode):
            rank.say("close", room)
        return arrived

    def deliver(self, prefill: RankProcess, decode: RankProcess, room: str, pages: int, seconds: float = 60.0) -> None:
        """A hand-over that must succeed, at the first try."""
        first = self._page % (PAGES - pages + 1)
        self._page += 7
        self.begin(prefill, decode, room, range(first, first + pages), range(PAGES - pages - first, PAGES - first))
        arrived = self.conclude(prefill, decode, room, seconds)
        assert arrived and prefill.good(room, "transfer"), f"{room} failed\n{self.story()}"

    def nothing_left(self, *ranks: RankProcess, seconds: float = 10.0) -> None:
        """No room, no page, no handle of unknown fate; and nothing landed where nothing may."""
        counts = ("rooms", "in_flight", "unproven", "trailing", "held", "outstanding", "unfenced", "late", "damaged")
        before = [rank.statuses for rank in ranks]

        def clean() -> bool:
            fresh = all(rank.statuses > seen + 1 for rank, seen in zip(ranks, before, strict=True))
            return fresh and not any(rank.status.get(name) for rank in ranks for name in counts)

        self.wait(clean, seconds)

    def _start(self, host: str, epoch: int, module: str, *arguments: str) -> RankProcess:
        rank = RankProcess(self, host, epoch, module, *arguments)
        self.ranks.append(rank)
        self.wait(lambda: rank.status, START)
        return rank
