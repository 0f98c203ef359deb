"""Ours beside aiperf: the witness between a client and its server, and what is told of two clients' figures."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from bench.against_aiperf import compare, figures_of, figures_of_rows
from bench.client import Client, Exchange
from bench.records import Record
from bench.relay import relayed
from tests.bench.fake_server import FakeServer


def test_a_relay_changes_no_answer_and_sees_each_request_between_client_and_server() -> None:
    async def main() -> tuple[list[Exchange], list[Record]]:
        async with FakeServer(pause=0.01).serving() as server:
            with relayed(server.url) as relay:
                async with Client(relay.url, "chat", "", 20.0, time.monotonic) as client:
                    body = {"model": "m", "messages": [], "max_tokens": 5, "stream": True}
                    exchanges = [await client.send(json.dumps(body).encode()) for _ in range(2)]
                    assert (await client.ask_json("GET", "/v1/models"))[0] == 200
            return exchanges, relay.records

    exchanges, records = asyncio.run(main())
    assert len(records) == 2
    for exchange, record in zip(exchanges, records, strict=True):
        assert exchange.error == ""
        assert [tokens for _, tokens in record.chunks] == [tokens for _, tokens in exchange.answer.chunks]
        assert record.output_tokens == exchange.answer.tokens == 5
        assert exchange.sent < record.scheduled < record.chunks[0][0] < exchange.answer.chunks[0][0]


def test_the_clients_are_held_against_each_other_by_what_their_relays_saw(capsys: pytest.CaptureFixture[str]) -> None:
    ours, at_ours = {"ttft p50, ms": 203.0, "tpot p50, ms": 39.1}, {"ttft p50, ms": 200.0, "tpot p50, ms": 40.0}
    aiperf, at_aiperf = {"ttft p50, ms": 100.0, "tpot p50, ms": 40.0}, {"ttft p50, ms": 100.0, "tpot p50, ms": 40.0}
    assert compare(ours, at_ours, aiperf, at_aiperf) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    # The server was half as fast for ours, which says nothing of the clients.
    assert rows[1] == ["ttft", "p50,", "ms", "203.000", "1.50", "100.000", "0.00", "2.0300", "1.0150"]
    assert rows[2] == ["tpot", "p50,", "ms", "39.100", "-2.25", "40.000", "0.00", "0.9775", "0.9775"]
    assert compare(ours | {"tpot p50, ms": 39.3}, at_ours, aiperf, at_aiperf) == 0


def test_aiperfs_rows_become_the_same_figures() -> None:
    rows = [
        {"metadata": {"request_start_ns": start, "request_end_ns": start + 2_000_000_000},
         "metrics": {"time_to_first_token": {"value": ttft}, "inter_token_latency": {"value": 40.0},
                     "request_latency": {"value": 2000.0}, "output_sequence_length": {"value": 50}}}
        for start, ttft in ((0, 100.0), (1_000_000_000, 200.0), (2_000_000_000, 300.0))
    ]  # fmt: skip
    values = {"ttft": [100.0, 200.0, 300.0], "tpot": [40.0] * 3, "e2e": [2000.0] * 3}
    assert figures_of_rows(rows) == figures_of(values, 150 / 4)
    assert figures_of_rows(rows)["ttft p50, ms"] == 200.0
