"""An engine's process as the measurement sees it: started, asked, and its processor time read from outside.

In: a command that speaks as `bench.engines.adapter` says. Out: tokens, wall and CPU seconds of each answer. CPU is user
and system time of the process and of all below it, so it counts threads and helpers that its own clock would not.

Always holds: an answer has as many tokens as were asked for, or the run ends; no wait is without a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.idle_cpu import TICKS, descendants, read_sample

ANSWER_WITHIN = 600.0
LAST_WORDS = 12  # lines of its log that are shown when it fails


class EngineError(Exception):
    """An engine did not start, ended, or gave a wrong answer; the message says which, and what it said last."""


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[list[int]]
    wall_s: float
    cpu_s: float


class EngineProcess:
    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environment},
            )  # fmt: skip

    def wait_ready(self) -> str:
        """The engine's own name and version."""
        return str(self._read().get("engine", self.name))

    def ask(self, prompts: list[list[int]], new_tokens: int) -> Answer:
        began, used = time.monotonic(), self.cpu_s()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._error("has ended") from error
        tokens = self._read().get("tokens", [])
        took, used = time.monotonic() - began, max(self.cpu_s() - used, 1 / TICKS)
        if [len(answer) for answer in tokens] != [new_tokens] * len(prompts):
            lengths = [len(answer) for answer in tokens]
            raise self._error(f"was asked for {len(prompts)} answers of {new_tokens} tokens, gave {lengths}")
        return Answer(tokens, took, used)

    def cpu_s(self) -> float:
        samples = [read_sample(pid) for pid in descendants(self._process.pid)]
        return sum(sample.seconds for sample in samples if sample is not None)

    def stop(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        too_late = threading.Timer(ANSWER_WITHIN, self._process.kill)
        too_late.start()
        line = self._process.stdout.readline()
        too_late.cancel()
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise self._error(f"ended, or did not answer within {ANSWER_WITHIN:.0f} s") from error
        if not isinstance(answer, dict):
            raise self._error(f"said {line[:80]!r}")
        return answer

    def _error(self, what: str) -> EngineError:
        last = self._log.read_text(errors="replace").splitlines()[-LAST_WORDS:]
        return EngineError("\n  ".join([f"{self.name} {what}; its log ends with", *last]))
