"""The parts of the time to first token: pure sums, and what clients and Prometheus are told of them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from gateway.instances import Side
from gateway.phases import OTHER, TOLD, Breakdown
from paceline_proto.v1 import generation_pb2
from pipeline.io.phase_times import QUEUE
from pipeline.phases import FORWARD, GENERATE, PHASES, REPLY
from tests.gateway.scripted_cluster import cluster, run
from tests.gateway.scripted_instances import Kind, decode_saying, hang, outcome, refuses, tokens

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_parts_add_up_whatever_the_instances_claim() -> None:
    for claimed in ([("queue", 0.1), ("forward", 0.3)], [("forward", 99.0)], []):
        breakdown = Breakdown(10.0)
        breakdown.parsed(10.2)
        breakdown.called(0, 10.25)
        breakdown.called(0, 10.26)  # the other side of the pair
        breakdown.heard(Side.PREFILL, claimed, 10.75)
        breakdown.heard(Side.DECODE, [("transfer", 0.2)], 10.8)  # later: not on the way to the first token
        breakdown.delivered(10.9)
        breakdown.delivered(11.5)
        assert sum(seconds for _, seconds in breakdown.parts) == pytest.approx(0.9) == breakdown.total
        assert all(seconds >= 0 for _, seconds in breakdown.parts)
    assert [name for name, _ in breakdown.parts] == ["parse", "route", "network", "deliver"]


def test_what_a_failed_attempt_took_is_a_part_of_its_own() -> None:
    breakdown = Breakdown(0.0)
    breakdown.parsed(1.0)
    breakdown.called(0, 1.5)
    breakdown.called(1, 4.0)
    breakdown.heard(Side.DECODE, [("transfer", 0.5)], 5.0)
    assert breakdown.parts == [
        ("parse", 1.0),
        ("route", 0.5),
        ("resume", 2.5),
        ("network", 0.5),
        ("decode_transfer", 0.5),
    ]
    assert breakdown.server_timing().startswith("parse;dur=1000.000, route;dur=500.000, ")


def prefill_with_phases(first: int) -> Any:
    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        chunk = tokens(0, first)
        chunk.tokens.phases.add(name="queue", seconds=1e-7)
        chunk.tokens.phases.add(name="forward", seconds=2e-7)
        yield chunk
        ended = outcome(Kind.KIND_HANDED_OVER)
        ended.outcome.phases.add(name="hand_over", seconds=0.5)
        yield ended

    return script


@pytest.mark.parametrize("stream", [True, False])
def test_clients_and_prometheus_are_told(model_folder: Path, stream: bool) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefill_with_phases(7), decode_saying([7, 8, 9], Kind.KIND_LENGTH)) as c:
            async with aiohttp.ClientSession() as session:
                body = {"model": "m", "prompt": "say it", "max_tokens": 3, "stream": stream}
                async with session.post(f"{c.url}/v1/completions", json=body) as answer:
                    header = answer.headers["Server-Timing"]
                    await answer.read()
                async with session.get(f"{c.url}/metrics") as answer:
                    text = await answer.text()
        named = re.findall(r"(\w+);dur=", header)
        assert named == ["parse", "route", "network", "prefill_queue", "prefill_forward"]
        for part in (*named, *(["deliver"] if stream else [])):
            assert f'paceline_gateway_phase_seconds_count{{phase="{part}"}} 1.0' in text
        assert 'paceline_gateway_attempt_phase_seconds_sum{phase="hand_over",side="prefill"} 0.5' in text

    run(test)


def test_errors_before_a_token_have_no_breakdown(model_folder: Path) -> None:
    async def test() -> None:
        refused = refuses(grpc.StatusCode.INVALID_ARGUMENT, "no such token")
        async with cluster(model_folder, refused, hang) as c, aiohttp.ClientSession() as session:
            async with session.post(f"{c.url}/v1/completions", json={"model": "m", "prompt": "x"}) as answer:
                assert answer.status == 400 and "Server-Timing" not in answer.headers

    run(test)


@pytest.mark.parametrize(("sent", "passed"), [(TRACEPARENT, TRACEPARENT), ("00-nonsense", None), (None, None)])
def test_without_a_collector_the_clients_trace_goes_on_or_nothing(
    model_folder: Path, sent: str | None, passed: str | None
) -> None:
    async def test() -> None:
        heard: list[dict[str, Any]] = []

        async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
            heard.append(dict(context.invocation_metadata()))
            yield tokens(0, 7)
            yield outcome(Kind.KIND_HANDED_OVER)

        async with cluster(model_folder, script, decode_saying([7, 8], Kind.KIND_LENGTH)) as c:
            headers = {} if sent is None else {"Traceparent": sent}
            async with aiohttp.ClientSession(headers=headers) as session:
                async with session.post(f"{c.url}/v1/completions", json={"model": "m", "prompt": "x"}) as answer:
                    assert answer.status == 200
        assert heard[0].get("traceparent") == passed

    run(test)


def test_the_gateway_knows_every_phase_that_instances_of_its_release_tell() -> None:
    assert set(TOLD) == {QUEUE, FORWARD, GENERATE, REPLY, *PHASES.values()}


def test_phases_that_are_none_reach_neither_clients_nor_metrics(model_folder: Path) -> None:
    nonsense = [("forward", float("nan")), ("queue", -5.0), ("wait", float("inf")), ("a\r\nX-Evil: 1", 1e-9)]

    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        chunk, ended = tokens(0, 7), outcome(Kind.KIND_HANDED_OVER)
        for phases in (chunk.tokens.phases, ended.outcome.phases):
            for name, seconds in [*nonsense, *((f"p{number}", 1e-9) for number in range(2000))]:
                phases.add(name=name, seconds=seconds)
        yield chunk
        yield ended

    async def test() -> None:
        async with cluster(model_folder, script, decode_saying([7, 8, 9], Kind.KIND_LENGTH)) as c:
            async with aiohttp.ClientSession() as session:
                body = {"model": "m", "prompt": "say it", "max_tokens": 3, "stream": True}
                async with session.post(f"{c.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200 and (await answer.text()).endswith("data: [DONE]\n\n")
                    named = re.findall(r"(\w+);dur=", answer.headers["Server-Timing"])
                async with session.get(f"{c.url}/metrics") as metrics:
                    text = await metrics.text()
        assert named == ["parse", "route", "network", f"prefill_{OTHER}"]
        told = set(re.findall(r'attempt_phase_seconds_count{phase="([^"]*)",side="prefill"}', text))
        assert told == {OTHER} and "NaN" not in text

    run(test)
