"""The thread that owns a library, when the library does not come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from transfer.io.engine import Completion, EngineCounters
from transfer.io.owned_thread import OwnedThread
from transfer.regions import Write


class Stuck:
    """A driver whose library stays in a call until it is let go."""

    name = "stuck"

    def __init__(self) -> None:
        self.counters = EngineCounters()
        self.free = threading.Event()
        self._begun: list[int] = []

    def open(self) -> None: ...
    def register(self, address: int, nbytes: int) -> None: ...
    def endpoint(self) -> bytes:
        return b""

    def connect(self, peer_key: str, endpoint: bytes) -> None: ...
    def begin(self, handle: int, peer_key: str, writes: Sequence[Write]) -> list[Completion]:
        self._begun.append(handle)
        self.free.wait()
        return []

    def advance(self) -> list[Completion]:
        ended, self._begun = [Completion(handle) for handle in self._begun], []
        return ended

    def outstanding(self) -> bool:
        return bool(self._begun)

    def drop(self, peer_key: str) -> None: ...
    def close(self) -> None: ...


def polled(engine: OwnedThread, count: int) -> list[Completion]:
    found: list[Completion] = []
    end = time.monotonic() + 10.0
    while len(found) < count:
        assert time.monotonic() < end, found
        found += engine.poll()
        time.sleep(0.01)
    return found


def test_a_call_that_does_not_come_back_makes_all_that_is_outstanding_unknown_and_no_more() -> None:
    driver = Stuck()
    engine = OwnedThread(driver, longest_call=0.3)
    for handle in (1, 2):
        engine.submit(handle, "peer", [(1, 2, 3)], "room")
    assert engine.poll() == []
    unknown = polled(engine, 2)
    assert [one.handle for one in unknown] == [1, 2]
    assert all(one.error and "in one call" in one.error and not one.quiet for one in unknown)
    assert engine.poll() == [] and engine.handles_outstanding == 0 and driver.counters.handles_unknown == 2
    driver.free.set()
    assert polled(engine, 2) == [Completion(1), Completion(2)], "they have ended well after all"
    assert engine.close()
