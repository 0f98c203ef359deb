"""One supervised child process: started, watched and restarted.

In: a `ChildSpec` with a command and a probe. Out: events to a `Listener`. A child is restarted, with
a growing pause, when it exits and when it stops answering: a hung process (SIGSTOP, a deadlock) keeps
its sockets open, so those who wait for it would wait for ever; killing it turns silence into an error.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.family import Family


@dataclass(frozen=True, slots=True)
class Patience:
    """All waits of the supervision, in seconds."""

    probe_every: float = 2.0
    probe_timeout: float = 2.5
    silent: float = 10.0  # an answering child that stops answering for so long is killed
    first_answer: float = 180.0  # a starting child may import libraries on a busy machine
    first_pause: float = 0.5  # before a restart; doubles up to last_pause
    last_pause: float = 10.0
    steady: float = 60.0  # having run so long, the pause starts over
    stop: float = 10.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe learnt. `ready` means it takes work; `text` says the state for people."""

    ready: bool
    text: str
    note: str = ""  # what else people should know, said once


@dataclass(frozen=True, slots=True)
class ChildSpec:
    name: str
    role: str
    address: str
    command: tuple[str, ...]
    log: Path
    probe: Callable[[], Awaitable[Answer]]  # raises when there is no answer
    metrics: str = ""  # host:port where it serves Prometheus, besides its address
    environment: dict[str, str] = field(default_factory=dict)


class Listener(Protocol):
    def started(self, name: str, pid: int) -> None: ...
    def answered(self, name: str, answer: Answer) -> None: ...
    def ended(self, name: str, why: str, pause: float) -> None: ...


class Child:
    """Keeps one process running until `stop`."""

    def __init__(self, spec: ChildSpec, family: Family, listener: Listener, patience: Patience) -> None:
        self.spec = spec
        self.family = family
        self.listener = listener
        self.patience = patience
        self.process: asyncio.subprocess.Process | None = None
        self.stopping = False

    async def run(self) -> None:
        """Starts the process again and again; returns only when it is stopping."""
        pause = self.patience.first_pause
        while not self.stopping:
            began = time.monotonic()
            try:
                process = await self._start()
            except OSError as error:  # a full disk, say: it may have room again
                why = f"could not be started: {error}"
            else:
                why = await self._watch(process)
                self.family.buried(process.pid)
            if self.stopping:
                return
            if time.monotonic() - began > self.patience.steady:
                pause = self.patience.first_pause
            self.listener.ended(self.spec.name, why, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.patience.last_pause)

    async def stop(self) -> None:
        """SIGTERM, time to end well, then SIGKILL to the whole group."""
        self.stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        self.family.signal(process.pid, signal.SIGTERM)
        self.family.signal(process.pid, signal.SIGCONT)  # a stopped process cannot act on SIGTERM
        try:
            await asyncio.wait_for(process.wait(), self.patience.stop)
        except TimeoutError:
            self.family.kill(process.pid)
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        spec = self.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            log.write(f"--- {time.strftime('%F %T')} {' '.join(spec.command)}\n".encode())  # see `last_lines`
            log.flush()
            process = await self.family.spawn(spec.command, log, {**os.environ, **spec.environment})
        self.process = process
        if self.stopping:
            self.family.kill(process.pid)
        self.listener.started(spec.name, process.pid)
        return process

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        """Why it ended, or was ended."""
        patience = self.patience
        heard, answered, misses = time.monotonic(), False, 0
        while True:
            try:
                # A starting child is asked more often, for its progress is shown, and so is a silent one.
                calm = answered and not misses
                await asyncio.wait_for(process.wait(), patience.probe_every if calm else patience.probe_every / 4)
                return describe_exit(process.returncode or 0)
            except TimeoutError:
                pass
            if self.stopping:
                await process.wait()
                return "stopped"
            try:
                answer = await asyncio.wait_for(self.spec.probe(), patience.probe_timeout)
            except Exception:
                misses += 1
                silence = time.monotonic() - heard
                # Counted too, lest our own sleep (a suspended machine) be taken for its silence.
                if misses >= 3 and silence > (patience.silent if answered else patience.first_answer):
                    self.family.kill(process.pid)
                    await process.wait()
                    return f"did not answer for {silence:.0f} s and was killed"
            else:
                heard, answered, misses = time.monotonic(), True, 0
                self.listener.answered(self.spec.name, answer)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_lines(log: Path, count: int = 15) -> list[str]:
    """The end of what the last start wrote: nothing before its mark, and not the mark."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    marks = [at for at, line in enumerate(lines) if re.match(r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)]
    return lines[marks[-1] + 1 if marks else 0 :][-count:]
