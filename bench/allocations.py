"""How much memory a process allocates during a load: memray, attached from outside.

In: processes, and a load that runs meanwhile. Out: per process how often and how much was allocated, Python's own small
objects included, and where most of it. What is allocated and freed again counts each time: it is work, not memory in
use. Attaching needs gdb; a process that cannot be attached to is left out, with a note.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.members import Member

_ATTACHES_WITHIN = 60.0
_COUNTS_WITHIN = 600.0
_PLACES = 5


@dataclass(frozen=True, slots=True)
class Allocated:
    name: str
    times: int
    bytes: int
    largest: list[tuple[str, int]]  # place → bytes


class Trackers:
    """memray inside each process, from `start` until `collect`. Raises `SystemExit` if it cannot be used here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._attached: list[Member] = []

    def start(self, of: Sequence[Member]) -> None:
        if not (Path(sys.executable).parent / "memray").exists() or shutil.which("gdb") is None:
            raise SystemExit("paceline bench: --allocations needs memray (`make setup` installs it) and gdb")
        # One at a time: a process stands still while it is attached to, and those beside it wait for it only so long.
        self._attached = [member for member in of if self._attach(member)]

    def collect(self) -> list[Allocated]:
        for member in self._attached:
            self._detach(member)
        return [told for member in self._attached if (told := self._told(member)) is not None]

    def _attach(self, member: Member) -> bool:
        out = str(self._file(member))
        return _memray(
            member, "attach", "--method", "gdb", "--trace-python-allocators", "-f", "-o", out, str(member.pid)
        )

    def _detach(self, member: Member) -> None:
        _memray(member, "detach", "--method", "gdb", str(member.pid))

    def _told(self, member: Member) -> Allocated | None:
        told = self._folder / f"{member.pid}.json"
        places = ["-n", str(_PLACES)]
        if not _memray(member, "stats", "--json", *places, "-f", "-o", str(told), str(self._file(member))):
            return None
        body = json.loads(told.read_text())
        largest = [(place["location"], place["size"]) for place in body["top_allocations_by_size"]]
        return Allocated(member.name, body["total_num_allocations"], body["total_bytes_allocated"], largest)

    def _file(self, member: Member) -> Path:
        return self._folder / f"{member.pid}.memray"


def _memray(member: Member, *arguments: str) -> bool:
    patience = _COUNTS_WITHIN if arguments[0] == "stats" else _ATTACHES_WITHIN
    command = [str(Path(sys.executable).parent / "memray"), *arguments]
    try:
        done = subprocess.run(command, check=False, capture_output=True, timeout=patience, text=True)
    except subprocess.TimeoutExpired:
        print(f"note: memray {arguments[0]} of {member.name} did not end within {patience:g} s", file=sys.stderr)
        return False
    if done.returncode:
        why = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no word"]
        print(f"note: memray {arguments[0]} of {member.name}: {why[0]}", file=sys.stderr)
    return done.returncode == 0


def rows(allocated: Sequence[Allocated], ticks: dict[str, int], tokens: int) -> list[str]:
    """`ticks`: microbatches by rank; of other processes only output tokens are known."""
    if not allocated:
        return []
    lines = [f"{'allocated':20} {'per token':>10} {'KiB/token':>10} {'per tick':>9} {'KiB/tick':>9}   most of it"]
    for one in allocated:
        own = ticks.get(one.name, 0)
        per_tick = f"{one.times / own:9.0f} {one.bytes / own / 1024:9.1f}" if own else f"{'':9} {'':9}"
        place, size = one.largest[0] if one.largest else ("", 0)
        lines.append(
            f"{one.name:20} {one.times / tokens:10.0f} {one.bytes / tokens / 1024:10.1f} {per_tick}"
            f"   {size / max(1, one.bytes):.0%} {place}"
        )
    return lines
