"""Every open port of a running cluster, as the kernel lists them, and what its processes use.

In: pids. Out: listening sockets with the process that listens, and each process's memory and descriptors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

_LISTENING = 0x10000  # __SO_ACCEPTCON, in /proc/net/unix


@dataclass(frozen=True, slots=True)
class Port:
    process: str
    address: tuple[str, int] | str  # of TCP, or the path of a Unix socket ("\\0name": an abstract one)


@dataclass(frozen=True, slots=True)
class Use:
    memory: int
    descriptors: int


def open_ports(processes: dict[int, str]) -> list[Port]:
    """pid → name, in order of the names."""
    listening = _unix_listeners()
    found: list[Port] = []
    for pid, name in processes.items():
        tcp = psutil.Process(pid).net_connections("tcp")
        found += [Port(name, (one.laddr.ip, one.laddr.port)) for one in tcp if one.status == psutil.CONN_LISTEN]
        found += [Port(name, listening[inode]) for inode in _sockets(pid) if inode in listening]
    return sorted(found, key=lambda port: (port.process, str(port.address)))


def use(processes: Iterable[int]) -> dict[int, Use]:
    return {pid: Use(psutil.Process(pid).memory_info().rss, psutil.Process(pid).num_fds()) for pid in processes}


def _unix_listeners() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & _LISTENING:
            path = fields[7]
            found[fields[6]] = "\0" + path[1:] if path.startswith("@") else path
    return found


def _sockets(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.append(target[len("socket:[") : -1])
    return found
