"""Open and closed loops in virtual time: what is sent when, and that a slow server cannot hide its queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bench.answer import StreamedAnswer
from bench.client import Exchange
from bench.load import Load, Send
from bench.records import Record
from bench.workload import Ask, Planned
from tests.bench.virtual_time import run_virtually

SERVICE = 0.1  # seconds of the server for one request, one at a time


def one_at_a_time(service: float = SERVICE) -> Send:
    turn = asyncio.Lock()
    clock = asyncio.get_running_loop().time

    async def send(body: bytes) -> Exchange:
        exchange = Exchange(sent=clock())
        async with turn:
            await asyncio.sleep(service)
        exchange.answer = StreamedAnswer()
        exchange.answer.chunks = [(clock(), 1)]
        exchange.ended = clock()
        return exchange

    return send


def planned(*due: float) -> list[Planned]:
    return [Planned(index, at, Ask("", 1)) for index, at in enumerate(due)]


def loaded(due: list[float], go: Callable[[Load], object]) -> list[Record]:
    async def main() -> list[Record]:
        load = Load(one_at_a_time(), planned(*due), [b""] * len(due))
        records: list[Record] = await go(load)  # type: ignore[misc]
        return records

    return run_virtually(main())


def test_an_open_loop_sends_on_time_and_counts_the_server_s_queue() -> None:
    """20 requests a second at a server that does 10: request n waits for n·(100 − 50) ms more."""
    records = loaded([n / 20 for n in range(50)], lambda load: load.open_loop())
    assert [r.sent for r in records] == pytest.approx([n / 20 for n in range(50)])
    assert [r.ttft for r in records] == pytest.approx([0.1 + n * 0.05 for n in range(50)])


def test_a_closed_loop_at_the_same_server_shows_nothing_of_it() -> None:
    """Which is why it is no substitute: it asks only as fast as it is answered."""
    records = loaded([0.0] * 50, lambda load: load.closed_loop(1))
    assert [r.ttft for r in records] == pytest.approx([0.1] * 50)


def test_what_is_held_back_counts_from_its_schedule() -> None:
    """With room for one, the queue stands in the client instead of the server; the latency is the same."""
    records = loaded([n / 20 for n in range(50)], lambda load: load.open_loop(most=1))
    assert [r.ttft for r in records] == pytest.approx([0.1 + n * 0.05 for n in range(50)])
    assert records[49].sent - records[49].scheduled == pytest.approx(49 * 0.05)


def test_a_late_client_does_not_shorten_latencies() -> None:
    """The process stands still for a second while requests are due: they are sent late and counted from their time."""

    async def main() -> list[Record]:
        loop = asyncio.get_running_loop()
        load = Load(one_at_a_time(0.0), planned(0.0, 0.5, 2.0), [b""] * 3)

        def stand_still() -> None:
            loop._virtual.ahead += 1.0  # type: ignore[attr-defined]

        loop.call_at(0.4, stand_still)
        return await load.open_loop()

    assert [r.ttft for r in run_virtually(main())] == pytest.approx([0.0, 0.9, 0.0])


def test_a_closed_loop_keeps_as_many_in_flight_as_users() -> None:
    records = loaded([0.0] * 9, lambda load: load.closed_loop(3))
    assert [r.ttft for r in records] == pytest.approx([0.1, 0.2] + [0.3] * 7)
    assert sorted(r.index for r in records) == list(range(9))


def test_a_closed_loop_begins_nothing_after_its_time() -> None:
    records = loaded([0.0] * 100, lambda load: load.closed_loop(1, seconds=0.55))
    assert len(records) == 6
    assert max(r.scheduled for r in records) == pytest.approx(0.5)
