"""Whatever fails, each client gets one clean error and both sides end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest

from paceline_proto.v1 import common_pb2
from tests.gateway.scripted_cluster import Cluster, cluster, run, until
from tests.gateway.scripted_instances import (
    Kind,
    Script,
    decode_saying,
    hang,
    outcome,
    prefill_saying,
    refuses,
    scripted_decode,
    scripted_prefill,
    tells,
    tells_then_hangs,
    tokens,
)

ONE, TWO = 2751, 827
SAYS_ONE = tells_then_hangs(tokens(0, ONE), outcome(Kind.KIND_HANDED_OVER))


async def ask(c: Cluster, **fields: Any) -> Any:
    return await c.client.completions.create(model="m", prompt="x", **fields)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        (tells(outcome(Kind.KIND_ERROR, "out of pages")), 500, "out of pages"),
        (tells(outcome(Kind.KIND_ABORT, "draining")), 503, "draining"),
        (tells(), 500, "without an outcome"),
        (refuses(grpc.StatusCode.INVALID_ARGUMENT, "pool holds 4 tokens"), 400, "pool holds 4 tokens"),
        (refuses(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full"), 429, "queue is full"),
        (refuses(grpc.StatusCode.UNAVAILABLE, "restarting"), 503, "restarting"),
        (refuses(grpc.StatusCode.CANCELLED, "as you like"), 503, "as you like"),
        (refuses(grpc.StatusCode.INTERNAL, "boom"), 500, "boom"),
    ],
)
def test_one_side_fails_first(model_folder: Path, side: str, script: Script, status: int, message: str) -> None:
    async def test() -> None:
        sides = {"prefill": hang, "decode": hang} | {side: script}
        async with cluster(model_folder, sides["prefill"], sides["decode"], resumes=0) as c:
            with pytest.raises(openai.APIStatusError) as caught:
                await ask(c, stream=True)
            assert caught.value.status_code == status
            assert message in caught.value.message
            assert side in caught.value.message
            assert ("Retry-After" in caught.value.response.headers) == (status in (429, 503))
            other = c.decode if side == "prefill" else c.prefill
            await until(lambda: other.running == 0 and other.aborts)
            assert other.cancelled == [other.asked[0].request_id]
            assert message in other.aborts[0].reason

    run(test)


def test_failure_after_the_first_byte_is_an_event_and_no_done(model_folder: Path) -> None:
    async def test() -> None:
        breaks = refuses(grpc.StatusCode.INTERNAL, "rank 1 died", tokens(1, TWO))
        async with cluster(model_folder, SAYS_ONE, breaks) as c, aiohttp.ClientSession(c.url) as http:
            async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                assert answer.status == 200
                events = (await answer.read()).split(b"\n\n")
            assert events.pop() == b""
            bodies = [json.loads(event.removeprefix(b"data: ")) for event in events]
            assert "".join(body["choices"][0]["text"] for body in bodies[:-1]) != ""
            assert "rank 1 died" in bodies[-1]["error"]["message"]
            assert bodies[-1]["error"]["type"] == "server_error"
            await until(lambda: c.prefill.running == 0)
            assert c.prefill.aborts == [], "it had told its outcome"
            with pytest.raises(openai.APIError, match="rank 1 died"):
                async for _ in await ask(c, stream=True):
                    pass

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_both_sides(model_folder: Path, stream: bool) -> None:
    async def test() -> None:
        async with cluster(model_folder, SAYS_ONE, hang) as c, aiohttp.ClientSession(c.url) as http:
            if stream:
                answer = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
                assert await answer.content.readline()
                answer.close()
            else:
                waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
                await until(lambda: c.decode.running and c.prefill.running)
                waiting.cancel()
            await until(lambda: c.decode.running == 0 and c.prefill.running == 0)
            for side in (c.prefill, c.decode):
                assert side.cancelled == [side.asked[0].request_id]
                assert [a.reason for a in side.aborts] in (["client went away"], []), "no abort after an outcome"
            assert c.decode.aborts
            await until(lambda: c.server.gateway.in_flight == 0)

    run(test)


def test_more_than_max_inflight_is_refused(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, hang, hang, max_inflight=2) as c:
            waiting = [asyncio.create_task(ask(c)) for _ in range(2)]
            await until(lambda: c.server.gateway.in_flight == 2)
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(c)
            assert caught.value.response.headers["Retry-After"] == "1"
            for task in waiting:
                task.cancel()
            await until(lambda: c.server.gateway.in_flight == 0)

    run(test)


def test_nobody_waits_for_a_pair_beyond_the_clients_own_deadline(model_folder: Path) -> None:
    async def test() -> None:
        decode = scripted_decode(decode_saying([ONE, TWO]), serving=False)
        async with cluster(model_folder, prefill_saying(ONE), decode, pair_wait_s=600.0) as c:
            with pytest.raises(openai.InternalServerError, match="no decode instance is serving"):
                await ask(c, extra_headers={"X-Request-Timeout": "0.2"})

    run(test)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"serving": False, "not_serving_reason": "loading 40 %"}, "loading 40 %"),
        ({"page_size": 32}, "page size 16 and 32"),
        ({"vocab_size": 100}, "vocabulary of 100"),
        ({"role": 1}, "not a decode instance"),
        ({"instance": common_pb2.InstanceRef(instance_id="d\r\nX-Evil: 1", epoch=7)}, "its instance_id has 12 char"),
        ({"instance": common_pb2.InstanceRef(instance_id="d" * 257, epoch=7)}, "its instance_id has 257 char"),
    ],
)
def test_without_a_pair_clients_are_told_to_come_back(model_folder: Path, facts: dict[str, Any], reason: str) -> None:
    async def test() -> None:
        decode = scripted_decode(decode_saying([ONE, TWO]), **facts)
        async with (
            cluster(model_folder, prefill_saying(ONE), decode) as c,
            aiohttp.ClientSession(c.url) as http,
        ):
            await until(lambda: all("not asked" not in str(e["status"]) for e in c.server.gateway.registry.describe()))
            async with http.get("/health") as answer:
                assert answer.status == 503
                assert reason in await answer.text()
            with pytest.raises(openai.APIStatusError) as caught:
                await ask(c)
            assert caught.value.status_code == 503
            assert "Retry-After" in caught.value.response.headers
            assert (await c.client.models.list()).data, "models are listed all the same"
            decode.facts.clear()
            await until(lambda: c.server.gateway.why_unavailable() is None)
            assert (await ask(c)).choices[0].finish_reason == "stop"

    run(test)


def test_incompatible_instances_are_told_once(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        decode = scripted_decode(hang, kv_dtype="bfloat16")
        async with cluster(model_folder, hang, decode, describe_interval_s=0.02) as c:
            await until(lambda: c.server.gateway.registry.fleet.decodes)
            await asyncio.sleep(0.2)

    run(test)
    told = [record for record in caplog.records if "never paired" in record.getMessage()]
    assert len(told) == 1
    assert "KV dtype 'float32' and 'bfloat16'" in told[0].getMessage()


def test_a_restarted_instance_is_used_again_with_its_new_epoch(model_folder: Path) -> None:
    async def test() -> None:
        prefill = scripted_prefill(prefill_saying(ONE))
        decode = scripted_decode(refuses(grpc.StatusCode.UNAVAILABLE, "restarting"))
        async with cluster(model_folder, prefill, decode, describe_interval_s=60) as c:
            decode.facts["serving"] = False
            waiting = asyncio.create_task(ask(c))
            await until(lambda: c.server.gateway.why_unavailable() is not None)
            decode.script = decode_saying([ONE, TWO])
            reborn = decode.description()
            reborn.instance.epoch = 8
            decode.facts |= {"serving": True, "instance": reborn.instance}
            assert (await waiting).choices[0].finish_reason == "stop"
            assert (await ask(c)).choices[0].finish_reason == "stop"
            assert [request.peer.epoch for request in prefill.asked] == [7, 8, 8]
            assert [request.epoch for request in decode.asked] == [7, 8, 8]

    run(test)


def test_the_deadline_ends_a_request_that_nothing_else_ends(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, hang, hang, request_timeout_s=0.2) as c:
            with pytest.raises(openai.APIStatusError) as caught:
                await ask(c)
            assert caught.value.status_code == 504
            assert 0.1 < c.decode.asked[0].timeout_s <= 0.2
            await until(lambda: c.decode.running == 0)

    run(test)


def fails_at_the_end_of_its_time(*before: Any) -> Script:
    async def script(request: Any, context: Any) -> Any:
        for response in before:
            yield response
        await asyncio.sleep(request.timeout_s)
        yield outcome(Kind.KIND_ERROR, "timed out while waiting")

    return script


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_what_an_instance_ends_at_the_end_of_its_time_is_a_timeout(model_folder: Path, side: str) -> None:
    async def test() -> None:
        sides = {"prefill": hang, "decode": hang} | {side: fails_at_the_end_of_its_time()}
        async with cluster(model_folder, sides["prefill"], sides["decode"]) as c:
            with pytest.raises(openai.APIStatusError, match="timed out while waiting") as caught:
                await ask(c, extra_headers={"X-Request-Timeout": "0.3"})
            assert (caught.value.status_code, caught.value.type, caught.value.code) == (504, "timeout_error", "timeout")
            assert counted(c, "timeout") == 1

    run(test)


def test_a_stream_whose_time_ends_says_timeout_in_its_error_event(model_folder: Path) -> None:
    async def test() -> None:
        late = fails_at_the_end_of_its_time(tokens(1, TWO))
        async with cluster(model_folder, SAYS_ONE, late) as c:
            with pytest.raises(openai.APIError, match="timed out while waiting") as caught:
                async for _ in await ask(c, stream=True, extra_headers={"X-Request-Timeout": "0.3"}):
                    pass
            assert (caught.value.type, caught.value.code) == ("timeout_error", "timeout")
            await until(lambda: counted(c, "timeout") == 1)

    run(test)


def counted(c: Cluster, outcome: str) -> float:
    return c.server.gateway.metrics.requests.labels("completions", outcome)._value.get()


def test_stopping_ends_what_is_in_flight_with_one_error(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, SAYS_ONE, hang, shutdown_grace_s=0.1) as c:
            stream = await ask(c, stream=True)
            events = aiter(stream)
            await anext(events)
            drained = asyncio.create_task(c.server.gateway.drain())
            with pytest.raises(openai.APIError, match="the gateway is stopping"):
                await anext(events)
            await drained
            with pytest.raises(openai.InternalServerError, match="the gateway is stopping") as caught:
                await ask(c)
            assert caught.value.status_code == 503
            await until(lambda: c.decode.cancelled)
            assert [abort.reason for abort in c.decode.aborts] == ["the gateway is stopping"]

    run(test)
