"""Where the ranks of an instance run: on this host alone, or on several.

In: which host each rank belongs to. Out: rank processes, started where they belong. Invariants: rank 0
runs here; a host's ranks are neighbours; `ready` returns only when no rank of an earlier epoch is
alive anywhere that could still do harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.io.child import Child
from pipeline.io.control import RankConfig


@dataclass(frozen=True, slots=True)
class Host:
    """One of them, as its ranks and their peers need it."""

    address: str  # that peers, and the ranks of other hosts, reach
    run_dir: str
    model: str

    def sockets(self, epoch: int) -> str:
        """The folder in which `RunFolder.open_epoch` lets the sockets of an epoch be."""
        return f"{self.run_dir}/e{epoch}"

    @property
    def dumps(self) -> str:
        return f"{self.run_dir}/dumps"


class RankProcess(Protocol):
    """A rank's process as its incarnation needs it, wherever it runs."""

    exited: asyncio.Event
    pid: int  # 0: not known yet

    @property
    def last_lines(self) -> Sequence[str]:
        """Of what it wrote."""

    def exit_status(self) -> str:
        """How it ended, in words."""

    def was_killed(self) -> bool:
        """Whether something else than the rank itself ended it."""

    def kill(self) -> None: ...
    async def reap(self, patience: float) -> bool:
        """False: it did not die within `patience` seconds of being killed."""


Launch = Callable[[RankConfig, Callable[[int], None]], RankProcess]


class Hosts(Protocol):
    def waiting(self) -> str:
        """What the next epoch waits for, for people; empty if for nothing."""

    async def ready(self) -> None:
        """Returns when the next epoch may start."""

    def epoch_over(self) -> None:
        """Every rank that can be reached is dead; before the first epoch too."""

    def epoch_floor(self) -> int:
        """The highest epoch that any host remembers."""

    def of_ranks(self, epoch: int) -> list[Host]:
        """In rank order, for an epoch that starts now."""

    def launch(self, config: RankConfig, on_exit: Callable[[int], None]) -> RankProcess: ...


class OneHost:
    """All ranks are children of this process."""

    def __init__(self, host: Host, ranks: int, rank_module: str, keep_fd: int) -> None:
        """`keep_fd` stays open in every rank for as long as it lives."""
        self._host, self._ranks, self._module, self._keep_fd = host, ranks, rank_module, keep_fd

    def waiting(self) -> str:
        return ""

    async def ready(self) -> None:
        pass  # the lock of the run folder has proven it, and later every end of an epoch

    def epoch_over(self) -> None:
        pass

    def epoch_floor(self) -> int:
        return 0

    def of_ranks(self, epoch: int) -> list[Host]:
        return [self._host] * self._ranks

    def launch(self, config: RankConfig, on_exit: Callable[[int], None]) -> RankProcess:
        return Child(self._module, config, self._keep_fd, on_exit)


def this_host(address: str, run_dir: Path, model: str) -> Host:
    return Host(address, str(run_dir.absolute()), str(Path(model).absolute()))
