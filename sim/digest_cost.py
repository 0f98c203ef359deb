"""`python -m sim.digest_cost FLIGHT`: what the always-on digest costs, from a recording of a real run.

In: a flight recording of a rank under load. Out: microseconds per launched tick spent on noting and
folding decisions, measured while the recorded log is applied again, beside the time between the ticks
of the recorded run (from its own clock). Medians over five replays.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from consensus import recorder
from consensus.digest import Digest
from decode.scheduler import DecodeReplica
from pipeline.replay import replay
from prefill.scheduler import PrefillReplica

ROLES = {"prefill": PrefillReplica, "decode": DecodeReplica}


def timed(path: str) -> tuple[float, int]:
    """(seconds in the digest, ticks) of one replay of the recording."""
    flight = recorder.read(Path(path).read_bytes())
    spent = 0.0
    note, fold = Digest.note, Digest.fold

    def timed_note(self: Digest, *decision: Any) -> None:
        nonlocal spent
        started = time.perf_counter()
        note(self, *decision)
        spent += time.perf_counter() - started

    def timed_fold(self: Digest) -> Any:
        nonlocal spent
        started = time.perf_counter()
        folded = fold(self)
        spent += time.perf_counter() - started
        return folded

    Digest.note, Digest.fold = timed_note, timed_fold  # type: ignore[method-assign]
    try:
        assert all(step.same for step in replay(flight, ROLES[flight.header.role]))
    finally:
        Digest.note, Digest.fold = note, fold  # type: ignore[method-assign]
    return spent, sum(record.entry.launch is not None for record in flight.records)


def main(path: str) -> None:
    flight = recorder.read(Path(path).read_bytes())
    clocks = [record.entry.clock for record in flight.records if record.entry.launch is not None]
    # Gaps of a second and more are pauses of the load, not ticks.
    gaps = [later - earlier for earlier, later in zip(clocks, clocks[1:], strict=False) if later - earlier < 1_000_000]
    replays = [timed(path) for _ in range(5)]
    cost = statistics.median(seconds / max(ticks, 1) for seconds, ticks in replays) * 1e6
    period = statistics.median(gaps)
    print(f"{len(flight.records)} entries, {len(clocks)} ticks; a tick every {period / 1000:.2f} ms (median)")
    print(f"digest: {cost:.1f} µs per tick = {100 * cost / period:.2f} % of it")


if __name__ == "__main__":
    main(sys.argv[1])
