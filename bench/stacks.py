"""Which part of a process's Python threads encodes and decodes messages: py-spy, attached from outside.

In: processes, and a load that runs meanwhile. Out: per process the samples in which a thread was at work, and the
share of them that was inside an encoder or decoder: msgspec's, protobuf's or json's own code, native or Python. Threads
that run no Python (gRPC's, ZeroMQ's, transfer engines') have no samples.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from bench.members import Member

RATE = 100  # samples a second
_ENDS_WITHIN = 60.0
# Of a native frame its library, of a Python one its file, as py-spy tells them in parentheses.
CODECS = {
    "msgspec": ("msgspec/",),
    "protobuf": ("_message.abi3.so", "google/protobuf/", "protobuf/internal/", "_pb2.py"),
    "json": ("_json.cpython", "json/"),
}
# What a thread is in while it waits: functions of the C library, and those that call into nameless parts of it.
_WAITS = ("epoll_wait", "poll", "ppoll", "select", "clock_nanosleep", "pthread_cond_", "sem_")
_WAITING_CALLERS = ("PyThread_acquire_lock_timed", "take_gil", "time_sleep")
_LIBC = "(libc.so"


@dataclass(frozen=True, slots=True)
class Stacks:
    name: str
    samples: int  # of threads at work
    shares: dict[str, float]  # codec → share of them
    hottest: list[tuple[str, float]]  # innermost Python functions


class Spies:
    """py-spy beside each process, from `start`, which waits for it, until `collect`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[tuple[Member, subprocess.Popen[str], Path]] = []

    def start(self, of: Sequence[Member]) -> None:
        program = Path(sys.executable).parent / "py-spy"
        if not program.exists():
            raise SystemExit("paceline bench: --stacks needs py-spy: `make setup` installs it")
        for member in of:
            out = self._folder / f"{member.pid}.raw"
            command = [str(program), "record", "--native", "--threads", "--format", "raw",
                       "--rate", str(RATE), "--pid", str(member.pid), "--output", str(out)]  # fmt: skip
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self._running.append((member, process, out))
        for _, process, _ in self._running:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and "Sampling process" not in line:
                pass

    def collect(self) -> list[Stacks]:
        """A process whose stacks could not be had is left out, with a note."""
        for _, process, _ in self._running:
            process.send_signal(signal.SIGINT)
        found = []
        for member, process, out in self._running:
            try:
                said, _ = process.communicate(timeout=_ENDS_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
            if out.exists():
                found.append(summarise_stacks(member.name, out.read_text(errors="replace").splitlines()))
            else:
                why = said.strip().splitlines()[-1:] or ["py-spy cannot attach to it"]
                print(f"note: no stacks of {member.name}: {why[0]}", file=sys.stderr)
        return found


def summarise_stacks(name: str, lines: Iterable[str]) -> Stacks:
    """Lines of py-spy's raw format: frames from the outermost on, separated by semicolons, then how often."""
    at_work, inside, innermost = 0, Counter[str](), Counter[str]()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if not count.isdigit() or _waits(frames):
            continue
        at_work += int(count)
        for codec, places in CODECS.items():
            if any(place in _place(frame) for frame in frames for place in places):
                inside[codec] += int(count)
                break
        python = [frame for frame in frames if ".py:" in frame]
        innermost[python[-1].partition(" ")[0] + " " + _place(python[-1]) if python else "native"] += int(count)
    whole = max(1, at_work)
    return Stacks(
        name,
        at_work,
        {codec: inside[codec] / whole for codec in CODECS},
        [(what, times / whole) for what, times in innermost.most_common(8)],
    )


def _waits(frames: Sequence[str]) -> bool:
    """For an event, a lock, a moment, or Python's interpreter lock."""
    inner = list(takewhile(lambda frame: _LIBC in frame, reversed(frames)))
    if any(frame.startswith(_WAITS) for frame in inner):
        return True
    caller = frames[-1 - len(inner)] if len(inner) < len(frames) else ""
    return bool(inner) and caller.startswith(_WAITING_CALLERS)


def _place(frame: str) -> str:
    return frame.rpartition("(")[2].removesuffix(")")


def rows(stacks: Sequence[Stacks]) -> list[str]:
    if not stacks:
        return []
    head = (
        f"{'share of samples at work':26} {'samples':>8}" + "".join(f"{codec:>10}" for codec in CODECS) + f"{'all':>8}"
    )
    return [head] + [
        f"{one.name:26} {one.samples:8}" + "".join(f"{one.shares[codec]:10.1%}" for codec in CODECS)
        + f"{sum(one.shares.values()):8.1%}"
        for one in stacks
    ]  # fmt: skip
