"""A group on this machine: a leader and members as daemons of their own, each in a folder of its own, over TCP."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import psutil

from tests.pipeline.daemon_harness import Daemon, eventually

LEASE_S = 2.0  # ring_timeout; short, so that what waits for it is not long
REMEMBERED = 7  # the epoch that run folders remember in which the group is said to have run before


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ScriptedGroup:
    """`size` daemons of one instance with `ranks` ranks."""

    def __init__(self, folder: Path, size: int = 2, ranks: int = 2, **config: Any) -> None:
        self.folder, self.size = folder, size
        self.address = f"127.0.0.1:{free_port()}"
        # Scripted ranks open no sockets among themselves; the daemon listens at the third port of rank 0.
        self.settings = {
            "pp_size": ranks, "group_size": size, "ring_ports": free_port() - 2, "ring_timeout": LEASE_S, **config,
        }  # fmt: skip
        self.daemons: list[Daemon] = []

    def leader(self, folder: str = "", **config: Any) -> Daemon:
        """In a new `folder`, or in the one that remembers."""
        self._remember("" if folder else "leader")
        return self._start(folder or "leader", listen=self.address, **config)

    def member(self, index: int = 1, folder: str = "", digest: str = "", **config: Any) -> Daemon:
        name = f"member{index}"
        self._remember("" if folder else name)
        return self._start(folder or name, digest, group_index=index, leader=self.address, **config)

    def _remember(self, folder: str) -> None:
        run = self.folder / folder / "run"
        if folder and not run.exists():
            run.mkdir(mode=0o700, parents=True)
            (run / "epoch").write_text(f"{REMEMBERED}\n")

    def _start(self, folder: str, digest: str = "", **config: Any) -> Daemon:
        place = self.folder / folder
        (place / "model").mkdir(parents=True, exist_ok=True)
        if digest:
            (place / "model" / "digest").write_text(digest)
        self.daemons.append(Daemon(place, **(self.settings | config)))
        return self.daemons[-1]

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.close()


def children(daemon: Daemon) -> list[int]:
    """Process ids of the ranks that it started."""
    return [child.pid for child in psutil.Process(daemon.process.pid).children()]


def waits_for(leader: Daemon, what: str) -> str:
    """Why the leader does not serve, as soon as `what` is in it."""

    def probe() -> str:
        assert leader.process.poll() is None, leader.log
        reason = leader.describe().not_serving_reason
        return reason if what in reason else ""

    return eventually(f"not serving for: {what}", probe)


def signal_to(daemon: Daemon, number: int) -> None:
    os.kill(daemon.process.pid, number)
