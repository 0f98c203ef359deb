"""Not a test: a decode rank whose allocator, on rank 1, gives out other pages from the third lease on (A13)."""

from __future__ import annotations

from typing import Any

import zmq

from decode.io.port import DecodePort
from decode.io.rank_process import make_port
from decode.scheduler import DecodeReplica
from engine.runtime import Runtime
from pipeline.io.boot import run_rank
from pipeline.io.control import RankConfig
from pipeline.pages import PagePool

GOOD_CALLS = 2


def take_other_pages() -> None:
    """Patches this process only; the daemon and the other ranks are as shipped."""
    honest = PagePool.take
    calls = 0

    def take(self: PagePool, count: int) -> tuple[int, ...]:
        nonlocal calls
        calls += 1
        pages = honest(self, count)
        return pages[::-1] if calls > GOOD_CALLS else pages

    PagePool.take = take  # type: ignore[method-assign]


def make_faulty(config: RankConfig, stage: Any, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[DecodePort, str, str]:
    if config.rank == 1:
        take_other_pages()
    return make_port(config, stage, context)


if __name__ == "__main__":
    run_rank(DecodeReplica, Runtime, make_faulty)
