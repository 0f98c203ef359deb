"""What each rank of a cluster did during a load: bubbles, and what a microbatch cost its control loop.

In: the cluster's run directory; `RankWatch` reads it when the load begins and when it has ended. Out: `RankFigures` and
`ProcessFigures`.
A rank's control loop is the main thread of its process: everything but forwards (the executor's thread) and what the
transfer and gRPC do on threads of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.members import Member, members, spent
from bench.timelines import Busy, RankTimes, busy, now_us, read_times
from security.secrets import Secrets


@dataclass(frozen=True, slots=True)
class RankFigures:
    """`bubble_fraction` and the seconds (see `Busy`) cover `seen` of the load: all of it, unless more microbatches were
    launched than a rank keeps."""

    name: str
    ticks: int
    rows_per_tick: float
    entries_per_tick: float
    in_flight_s: float
    computing_s: float
    waiting_s: float
    empty_s: float
    bubble_fraction: float
    control_us_per_tick: float
    seen: float


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    name: str
    cpu_seconds: float
    control_seconds: float  # of the main thread
    starved_seconds: float  # a thread could have run, and no processor was free
    resident_mib: float


class RankWatch:
    def __init__(self, run_dir: Path, secrets: Secrets | None = None) -> None:
        self._run_dir, self._secrets = run_dir, secrets
        self.members: Sequence[Member] = members(run_dir, secrets)

    def begin(self) -> None:
        before = read_times(self._run_dir, 0, self._secrets)
        self._last = {_name(times): _reached(times) for times in before}
        self._spent = spent(self.members)
        self._begin = now_us()

    def ended(self) -> tuple[list[RankFigures], list[ProcessFigures]]:
        end, used = now_us(), spent(self.members)
        processes = [
            ProcessFigures(
                name, after.whole - self._spent[name].whole, after.main - self._spent[name].main,
                after.starved - self._spent[name].starved, after.resident / (1 << 20),
            )
            for name, after in used.items() if name in self._spent
        ]  # fmt: skip
        main = {one.name: one.control_seconds for one in processes}
        told = read_times(self._run_dir, self._begin, self._secrets)
        ranks = [
            figures(times, self._begin, end, self._last[_name(times)], main[_name(times)])
            for times in told
            if times.ticks and _name(times) in self._last and _name(times) in main
        ]
        return ranks, processes


def figures(times: RankTimes, begin: int, end: int, last: tuple[int, int], control: float) -> RankFigures:
    """`last`: tick and entry that had been reached at `begin`. `control`: seconds of the main thread."""
    kept_since = times.ticks[0].launched_us if times.lost else begin
    tick, entry = _reached(times)
    ticks = tick - last[0]
    found: Busy = busy(times, kept_since, end)
    return RankFigures(
        name=_name(times),
        ticks=ticks,
        rows_per_tick=sum(tick.rows for tick in times.ticks) / len(times.ticks),
        entries_per_tick=(entry - last[1]) / ticks,
        in_flight_s=found.in_flight,
        computing_s=found.computing,
        waiting_s=found.waiting,
        empty_s=found.empty,
        bubble_fraction=found.bubble_fraction,
        control_us_per_tick=1e6 * control / ticks,
        seen=(end - kept_since) / (end - begin),
    )


def _name(times: RankTimes) -> str:
    return f"{times.instance} rank {times.rank}"


def _reached(times: RankTimes) -> tuple[int, int]:
    """The last tick and the last entry."""
    return (times.ticks[-1].tick if times.ticks else 0, times.entries[-1].seq if times.entries else 0)


_HEAD = (
    "ticks", "rows/tick", "entries/tick", "in flight s", "computing s", "waiting s", "empty s", "bubbles",
    "control µs/tick",
)  # fmt: skip


def rows(ranks: Sequence[RankFigures]) -> list[str]:
    if not ranks:
        return []
    lines = [f"{'rank':18}" + "".join(f"{name:>{len(name) + 2}}" for name in _HEAD)]
    for one in ranks:
        cells = (
            f"{one.ticks}", f"{one.rows_per_tick:.1f}", f"{one.entries_per_tick:.2f}", f"{one.in_flight_s:.2f}",
            f"{one.computing_s:.2f}", f"{one.waiting_s:.2f}", f"{one.empty_s:.2f}", f"{one.bubble_fraction:.1%}",
            f"{one.control_us_per_tick:.0f}",
        )  # fmt: skip
        aligned = (f"{cell:>{len(name) + 2}}" for name, cell in zip(_HEAD, cells, strict=True))
        lines.append(f"{one.name:18}" + "".join(aligned))
    if (least := min(one.seen for one in ranks)) < 1:
        lines.append(
            f"note: ranks keep their last microbatches only; these seconds are of the last {least:.0%} of the load"
        )
    return lines
