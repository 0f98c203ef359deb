"""Row T12 on every real engine: what a process holds does not grow with the transfers it has made."""

from __future__ import annotations

import gc
import os
import threading

import psutil
import pytest

from tests.transfer.rig import Rig, on_real_engines

TOKENS = 10
MIB = 1 << 20
LOOSE = {"mappings": 8}


def held(rig: Rig) -> dict[str, int]:
    """Everything that is counted, apart from memory."""
    with open("/proc/self/maps") as lines:
        mappings = len(lines.readlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "connections": len(psutil.Process().net_connections()),
        "mappings": mappings,
        "registrations": sum(engine.registrations for engine in rig.engines),
        "handles": sum(engine.handles_outstanding for engine in rig.engines),
        "handles of the library": sum(port.slot.handles_outstanding for port in rig.senders),
        "handles of the side": sum(len(port.side._handles) for port in rig.senders),
        "hashes": sum(len(port._hashes) + len(port._written) for port in rig.senders),
        "rooms": sum(len(port.side.rooms()) for port in rig.ports()),
        "revocations": sum(len(port._revocations) for port in rig.receivers),
    }


def make(rig: Rig, first: int, count: int) -> None:
    for number in range(first, first + count):
        pages = [(number + step) % 8 for step in range(3)]
        rig.hand_over(f"r{number}/0", TOKENS, pages, pages[::-1])
        rig.told.clear()  # what the test itself keeps
    rig.assert_baseline()
    rig.pump(lambda: not any(port._revocations for port in rig.receivers))  # of leases that ended well


def many(backend: str, transfers: int, memory: int) -> None:
    with Rig(backend, 1, 2, layers=2, pages=8) as rig:
        make(rig, 0, 200)  # caches, pools of threads and connections
        gc.collect()
        before, resident = held(rig), psutil.Process().memory_info().rss
        make(rig, 200, transfers)
        gc.collect()
        after, grown = held(rig), psutil.Process().memory_info().rss - resident
        more = {name: after[name] - before[name] for name in after if after[name] > before[name]}
        # Other tests of this process may leave less behind as it goes on; the system's own caches may be a few more.
        assert all(change <= LOOSE.get(name, 0) for name, change in more.items()), more
        assert grown < memory, f"{grown / MIB:.1f} MiB more after {transfers} transfers"
        assert rig.senders[0].counters().handles_done == 2 * (200 + transfers)
        print(f"{backend}: {transfers} transfers, {grown / MIB:.2f} MiB, {more}")


@on_real_engines
def test_T12_a_thousand_transfers_leave_a_process_as_it_was(backend: str) -> None:
    many(backend, 1_000, 6 * MIB)


@pytest.mark.soak
@pytest.mark.timeout(900)
@on_real_engines
def test_T12_ten_thousand_transfers_leave_a_process_as_it_was(backend: str) -> None:
    many(backend, 10_000, 16 * MIB)
