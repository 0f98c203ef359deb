"""A rank process on another host, as the leader's incarnation sees it.

In: what its member tells of it, and the loss of the member. Out: one call when it exits or is lost.
Invariant: a lost rank counts as ended here, but as dead only by the rules of `pipeline.group`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pipeline.io.control import RankConfig

log = logging.getLogger("paceline.rank")

CLEAN_EXIT = "exited with code 0"
LAST_LINES = 20
_LONGEST = 2000


class RemoteRank:
    """`pipeline.io.hosts.RankProcess`."""

    def __init__(self, config: RankConfig, on_exit: Callable[[int], None], end_epoch: Callable[[], None]) -> None:
        """`end_epoch` asks the member to kill and reap all of its ranks."""
        self.rank, self.pid = config.rank, 0
        self.exited = asyncio.Event()
        self.last_lines: list[str] = []
        self._label = f"[{config.instance} rank {config.rank} on {config.host}]"
        self._status, self._killed = "still runs", False
        self._gone = asyncio.Event()  # reaped by its member, or out of reach with it
        self._on_exit, self._end_epoch = on_exit, end_epoch

    def exit_status(self) -> str:
        return self._status

    def was_killed(self) -> bool:
        return self._killed

    def kill(self) -> None:
        if not self._gone.is_set():
            self._end_epoch()

    async def reap(self, patience: float) -> bool:
        try:
            async with asyncio.timeout(patience):
                await self._gone.wait()
        except TimeoutError:
            return False
        return True

    def ended(self, status: str, killed: bool, last_lines: Sequence[str]) -> None:
        if not self.exited.is_set():
            self._status, self._killed = status[:200], killed
            self.last_lines = [line[:_LONGEST] for line in last_lines[-LAST_LINES:]]
            for line in self.last_lines if killed or status != CLEAN_EXIT else ():
                log.info("%s %s", self._label, line)
            self.exited.set()
            self._on_exit(self.rank)

    def reaped(self) -> None:
        self._gone.set()
        self.ended("was ended by its member", True, [])

    def lost(self, why: str) -> None:
        self._gone.set()
        self.ended(why, True, [])
