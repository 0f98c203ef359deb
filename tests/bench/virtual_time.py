"""An event loop whose clock jumps to the next timer: whatever sleeps takes no time, and the same time every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.DefaultSelector):
    """Instead of waiting, puts the clock forward by as long as it would have waited."""

    ahead = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits and nothing will ever happen"
        self.ahead += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _NoWaiting()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.ahead


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
