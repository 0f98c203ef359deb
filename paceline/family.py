"""All processes below this one: started in groups of their own, killed as trees, none left behind.

Invariants: a child is killed by the kernel when this process dies, however it dies. A grandchild whose
parent died is adopted by this process (it is a subreaper) and ended: a dead daemon's rank would
still write into its peers.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

LAUNCHER = Path(__file__).with_name("die_with_parent.py")
PR_SET_CHILD_SUBREAPER = 36


class Family:
    def __init__(self) -> None:
        self.pids: set[int] = set()
        self._starting = 0
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    async def spawn(
        self, command: Sequence[str], log: IO[bytes], environment: dict[str, str]
    ) -> asyncio.subprocess.Process:
        self._starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment,
            )  # fmt: skip
            self.pids.add(process.pid)
            return process
        finally:
            self._starting -= 1

    def buried(self, pid: int) -> None:
        """To be called when a child has ended: what it left behind is ended too."""
        self.pids.discard(pid)
        self.end_orphans()

    def signal(self, pid: int, number: int) -> None:
        """To a child that has not been waited for, so the pid is still its own."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    def kill(self, pid: int) -> None:
        """Ends a child and everything it started, also what moved to a session of its own."""
        for member in _descendants(pid):
            _kill(member)
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def end_orphans(self) -> None:
        """Ends and reaps adopted processes. Not while a child is starting: it looks like one."""
        if self._starting:
            return
        for orphan in _children(os.getpid()):
            if orphan.pid in self.pids:
                continue
            for member in _descendants(orphan.pid):
                _kill(member)
            _kill(orphan)
            try:
                os.waitpid(orphan.pid, 0)
            except ChildProcessError:
                pass


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.Error:
        return []


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _kill(member: psutil.Process) -> None:
    try:
        member.kill()  # psutil checks the start time: a reused pid is safe
    except psutil.Error:
        pass
