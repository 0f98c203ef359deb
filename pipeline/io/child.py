"""One rank process as the daemon sees it: born, listened to, killed, reaped.

In: a `RankConfig` and the module to run. Out: its log lines in ours, the last of them kept, and one
call when it exits. Invariants: a killed process takes its whole process group along; the pid stays
ours (a zombie) until `reap`, so no signal can hit a stranger; no thread and no polling is involved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable

import msgspec

from pipeline.io.control import RankConfig

log = logging.getLogger("paceline.rank")

_LONGEST_LINE = 2000
_LAST_LINES = 20


class Child:
    def __init__(self, module: str, config: RankConfig, keep_fd: int, on_exit: Callable[[int], None]) -> None:
        """Starts the process. `keep_fd` is inherited and stays open for as long as it lives."""
        self.rank = config.rank
        self.label = f"[{config.instance} rank {config.rank}]"
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.exited = asyncio.Event()
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._partial = b""
        stdin = os.memfd_create("rank-config")  # unlike a pipe: never full, never broken
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            os.write(stdin, msgspec.json.encode(config))
            os.lseek(stdin, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.io.birth", str(os.getpid()), module],
                stdin=stdin,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                pass_fds=(keep_fd,),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(stdin)
            os.close(writing)
        self.pid = self._process.pid
        self._output = reading
        os.set_blocking(reading, False)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(reading, self._read_output)
        self._loop.add_reader(self._pidfd, self._exit_seen)

    def exit_status(self) -> str:
        """How it ended, in words; leaves the zombie in place."""
        seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return "still runs"
        if seen.si_code == os.CLD_EXITED:
            return f"exited with code {seen.si_status}"
        try:
            return f"was killed by {signal.Signals(seen.si_status).name}"
        except ValueError:
            return f"was killed by signal {seen.si_status}"

    def was_killed(self) -> bool:
        seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return seen is not None and seen.si_code != os.CLD_EXITED

    def kill(self) -> None:
        """Ends the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def reap(self, patience: float) -> bool:
        """Collects the dead process. False: it did not die within `patience` seconds of being killed."""
        try:
            async with asyncio.timeout(patience):
                await self.exited.wait()
        except TimeoutError:
            return False
        self._process.wait()  # immediate: it is a zombie
        self._read_rest()
        if self._output >= 0:  # a grandchild may hold the other end
            self._close_output()
        os.close(self._pidfd)
        return True

    def _exit_seen(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._read_rest()  # its last words come before the news of its end
        self.exited.set()
        self._on_exit(self.rank)

    def _read_rest(self) -> None:
        for _ in range(64):
            if self._output < 0 or not self._read_output():
                return

    def _read_output(self) -> bool:
        """Takes in what the rank wrote; False: nothing more for now."""
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return False
        *lines, rest = (self._partial + data).split(b"\n")
        self._partial = rest[:_LONGEST_LINE]
        if not data and rest:
            lines.append(rest)
        for line in lines:
            text = line[:_LONGEST_LINE].decode(errors="replace").rstrip()
            if text:
                self.last_lines.append(text)
                log.info("%s %s", self.label, text)
        if not data:
            self._close_output()
        return bool(data)

    def _close_output(self) -> None:
        self._loop.remove_reader(self._output)
        os.close(self._output)
        self._output = -1
