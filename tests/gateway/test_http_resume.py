"""Clients of a gateway whose instances fail: one story, whatever was needed to tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest

from gateway.app import listening
from gateway.config import GatewayConfig
from paceline_proto.v1 import generation_pb2
from tests.gateway.scripted_cluster import Cluster, cluster, run, until
from tests.gateway.scripted_instances import (
    Kind,
    Script,
    ScriptedInstance,
    hang,
    outcome,
    refuses,
    scripted_decode,
    scripted_prefill,
    tokens,
)

OUTPUT = [2751, 827, 339, 2751, 506, 260]


def died(reason: str, hand_over: bool = False) -> generation_pb2.GenerateResponse:
    told = generation_pb2.Outcome(kind=Kind.KIND_ERROR, reason=reason, retryable=True, hand_over=hand_over)
    return generation_pb2.GenerateResponse(outcome=told)


async def prefills(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """Tells the first token that is not told yet."""
    yield tokens(request.resumed, OUTPUT[request.resumed])
    yield generation_pb2.GenerateResponse(outcome=generation_pb2.Outcome(kind=Kind.KIND_HANDED_OVER))


def decodes(until_token: int | None = None, then: generation_pb2.GenerateResponse | None = None) -> Script:
    """Tells all that is not told yet, and ends; or fails once `until_token` tokens are told."""

    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for at in range(request.resumed, len(OUTPUT)):
            if until_token is not None and at >= until_token:
                break
            yield tokens(at, OUTPUT[at])
        if until_token is not None:
            yield then or died("rank 1 was killed")
        yield outcome(Kind.KIND_LENGTH, count=len(OUTPUT))

    return script


def in_turn(*scripts: Script) -> Script:
    """Each call gets the next script, the later ones the last."""
    left = list(scripts)

    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in (left.pop(0) if len(left) > 1 else left[0])(request, context):
            yield response

    return script


async def told(c: Cluster, stream: bool = True, **fields: Any) -> list[int]:
    body = {"model": "m", "prompt": [5, 6], "max_tokens": len(OUTPUT), "stream": stream, **fields}
    body["extra_body"] = {"return_token_ids": True}
    create: Any = c.client.completions.create
    if not stream:
        answer = await create(**body)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, len(OUTPUT))
        return list(answer.choices[0].model_extra["token_ids"])
    ids: list[int] = []
    async for event in await create(**body, stream_options={"include_usage": True}):
        for choice in event.choices:
            ids += choice.model_extra["token_ids"]
        if event.usage:
            assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (2, len(OUTPUT))
    return ids


async def metrics(c: Cluster) -> dict[str, float]:
    async with aiohttp.ClientSession(c.url) as http, http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {
        name.removeprefix("paceline_gateway_"): float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("paceline_gateway_"))
    }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", range(1, len(OUTPUT)))
def test_decode_dies_after_n_tokens(model_folder: Path, n: int, stream: bool) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefills, in_turn(decodes(n), decodes())) as c:
            assert await told(c, stream, seed=3, frequency_penalty=0.5) == OUTPUT
            # The decode side tells all tokens by itself: the prefill call may still be on its way.
            await until(lambda: len(c.prefill.asked) == 2)
            for side in (c.prefill, c.decode):
                first, second = side.asked
                assert (first.attempt, first.resumed, list(first.prompt_ids)) == (0, 0, [5, 6])
                assert (second.attempt, second.resumed) == (1, n)
                assert list(second.prompt_ids) == [5, 6, *OUTPUT[:n]]
                assert second.sampling == first.sampling
                assert second.request_id == first.request_id
                assert second.timeout_s < first.timeout_s
            seen = await metrics(c)
            assert seen["attempts_total"] == 2
            assert seen["resumed_requests_total"] == 1
            assert seen['resumes_total{reason="decode"}'] == 1
            assert seen["prompt_tokens_total"] == 2
            assert seen["output_tokens_total"] == len(OUTPUT)

    run(test)


@pytest.mark.parametrize("hand_over", [True, False])
def test_prefill_dies_before_it_told_a_token(model_folder: Path, hand_over: bool) -> None:
    async def dies(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield died("its peer is silent", hand_over)

    async def test() -> None:
        async with cluster(model_folder, in_turn(dies, dies, prefills), in_turn(hang, hang, decodes())) as c:
            assert await told(c) == OUTPUT
            assert [request.resumed for request in c.prefill.asked] == [0, 0, 0]
            assert (await metrics(c))[f'resumes_total{{reason="{"hand_over" if hand_over else "prefill"}"}}'] == 2
            await until(lambda: c.decode.running == 0)
            assert [abort.attempt for abort in c.decode.aborts] == [0, 1], "what failed is told to end"

    run(test)


def test_G6_a_request_is_moved_off_draining_instances_without_a_resume_to_spare(model_folder: Path) -> None:
    """Decode lets go after two tokens; then prefill, then decode again, take nothing new."""

    async def refuses_draining(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "p0 is draining: new kernel", (("paceline-draining", "1"),))
        yield generation_pb2.GenerateResponse()

    let_go = died("d0 is draining: new kernel")
    let_go.outcome.draining = True

    async def test() -> None:
        decode = in_turn(decodes(2, let_go), hang, refuses_draining, decodes())
        async with cluster(model_folder, in_turn(prefills, refuses_draining, hang, prefills), decode, resumes=0) as c:
            assert await told(c) == OUTPUT
            assert [(request.attempt, request.resumed) for request in c.decode.asked] == [
                (0, 0),
                (1, 2),
                (2, 2),
                (3, 2),
            ]
            seen = await metrics(c)
            assert seen['resumes_total{reason="draining"}'] == 3 and seen["resumed_requests_total"] == 1

    run(test)


def test_a_late_token_of_a_failed_attempt_is_dropped(model_folder: Path) -> None:
    """Prefill dies; the decode side of that attempt goes on telling, beside the next attempt."""

    resumed = asyncio.Event()

    async def dies(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield tokens(0, OUTPUT[0])
        yield died("rank 0 was killed")

    async def next_attempt(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        resumed.set()
        async for response in prefills(request, context):
            yield response

    async def late(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield tokens(0, OUTPUT[0])
        with suppress(asyncio.CancelledError):
            await resumed.wait()
        for at in range(1, len(OUTPUT)):
            yield tokens(at, 99)
        # All of it may be told before prefill's death is.
        yield outcome(Kind.KIND_LENGTH, count=len(OUTPUT))

    async def test() -> None:
        async with cluster(model_folder, in_turn(dies, next_attempt), in_turn(late, decodes())) as c:
            assert await told(c) == OUTPUT

    run(test)


@pytest.mark.parametrize("last", [OUTPUT[-1], 2])
def test_only_the_outcome_is_lost(model_folder: Path, last: int) -> None:
    """All tokens are told, or the last one is an end-of-sequence: there is nothing to ask anybody for."""

    async def test() -> None:
        ids = OUTPUT if last != 2 else [*OUTPUT[:3], 2]
        script = tells_then_dies(*[tokens(at, one) for at, one in enumerate(ids)])
        async with cluster(model_folder, prefills, script) as c:
            answer = await c.client.completions.create(model="m", prompt=[5, 6], max_tokens=len(OUTPUT))
            assert answer.choices[0].finish_reason == ("length" if last != 2 else "stop")
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(ids)
            assert len(c.decode.asked) == 1

    run(test)


def tells_then_dies(*responses: generation_pb2.GenerateResponse) -> Script:
    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for response in responses:
            yield response
        yield died("rank 0 was killed")

    return script


def test_the_budget_is_kept_and_the_error_says_so(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefills, decodes(2), resumes=2) as c:
            with pytest.raises(openai.APIError, match="rank 1 was killed; not resumed: none of its 2 resumes is left"):
                await told(c)
            assert [request.attempt for request in c.decode.asked] == [0, 1, 2]
            seen = await metrics(c)
            assert seen["resumed_requests_total"] == 1
            assert seen['resumes_given_up_total{reason="decode"}'] == 1

    run(test)


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.ABORTED])
def test_what_speaks_of_the_request_itself_is_never_resumed(model_folder: Path, code: grpc.StatusCode) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefills, refuses(code, "no")) as c:
            with pytest.raises(openai.APIError, match="decode side: no"):
                await told(c)
            assert len(c.decode.asked) == 1

    run(test)


def test_a_full_queue_without_an_alternative_is_told_at_once(model_folder: Path) -> None:
    async def test() -> None:
        full = refuses(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
        async with cluster(model_folder, hang, full) as c:
            with pytest.raises(openai.RateLimitError):
                await told(c)
            assert len(c.decode.asked) == 1

    run(test)


def test_stop_strings_and_characters_go_over_the_seam(model_folder: Path) -> None:
    """What the gateway holds back, half a character or half a stop string, is not lost when an attempt ends."""

    async def test() -> None:
        undisturbed = await text_of(model_folder, decodes())
        for n in range(1, len(OUTPUT)):
            assert await text_of(model_folder, in_turn(decodes(n), decodes())) == undisturbed, f"after {n}"

    run(test)


async def text_of(model_folder: Path, decode: Script) -> tuple[str, str | None]:
    async with cluster(model_folder, prefills, decode) as c:
        stop = c.server.gateway.files.vocabulary.decode(OUTPUT[3:5])
        answer = await c.client.completions.create(model="m", prompt=[5, 6], max_tokens=len(OUTPUT), stop=[stop])
        return answer.choices[0].text, answer.choices[0].finish_reason


def test_a_single_pair_is_waited_for_until_it_serves_again(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefills, in_turn(decodes(3), decodes())) as c:
            waiting = asyncio.create_task(told(c))
            c.decode.facts |= {"serving": False}
            await until(lambda: c.server.gateway.why_unavailable() is not None)
            await asyncio.sleep(0.3)
            assert not waiting.done()
            assert len(c.decode.asked) == 1, "it is not asked while it does not serve"
            reborn = c.decode.description().instance
            reborn.epoch = 8
            c.decode.facts |= {"serving": True, "instance": reborn}
            assert await waiting == OUTPUT
            # The decode side tells all tokens by itself: the prefill call may still be on its way.
            await until(lambda: len(c.prefill.asked) == 2)
            assert (c.decode.asked[1].epoch, c.prefill.asked[1].peer.epoch) == (8, 8)

    run(test)


def test_waiting_for_a_pair_is_bounded(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefills, decodes(3), resume_wait_s=0.4) as c:
            waiting = asyncio.create_task(told(c))
            c.decode.facts |= {"serving": False}
            with pytest.raises(openai.APIError, match=r"not resumed: no pair came to serve within 0\.4 s"):
                await waiting

    run(test)


def test_a_wait_that_the_deadline_cuts_short_is_called_so(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefills, decodes(3), request_timeout_s=0.6) as c:
            waiting = asyncio.create_task(told(c))
            c.decode.facts |= {"serving": False}
            with pytest.raises(
                openai.APIError, match=r"no pair came to serve within the 0\.\d s that were left of its time"
            ):
                await waiting

    run(test)


def test_a_request_that_waits_for_a_pair_ends_with_the_gateway(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefills, decodes(3), shutdown_grace_s=0.2) as c:
            waiting = asyncio.create_task(told(c))
            c.decode.facts |= {"serving": False}
            await until(lambda: c.server.gateway.why_unavailable() is not None)
            await c.server.gateway.drain()
            with pytest.raises(openai.APIError, match="the gateway is stopping"):
                await waiting
            assert c.server.gateway.in_flight == 0

    run(test)


def test_a_client_that_leaves_while_a_pair_is_waited_for_leaves_nothing(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefills, decodes(3)) as c:
            waiting = asyncio.create_task(told(c))
            c.decode.facts |= {"serving": False}
            await until(lambda: c.server.gateway.why_unavailable() is not None)
            waiting.cancel()
            await until(lambda: c.server.gateway.in_flight == 0)

    run(test)


@asynccontextmanager
async def four(model: Path, decode: list[Script]) -> AsyncIterator[tuple[Cluster, list[ScriptedInstance]]]:
    """Two prefill instances and two decode instances; the cluster's own pair are the first two."""
    sides = [scripted_prefill(prefills, "p0"), scripted_prefill(prefills, "p1")]
    sides += [scripted_decode(script, f"d{i}") for i, script in enumerate(decode)]
    async with AsyncExitStack() as stack:
        for side in sides:
            await stack.enter_async_context(side.serving())
        addresses = [side.address for side in sides]
        config = GatewayConfig(
            model=model, model_name="m", port=0, prefill=tuple(addresses[:2]), decode=tuple(addresses[2:])
        )
        server = await stack.enter_async_context(listening(config))
        url = f"http://127.0.0.1:{server.port}/v1"
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
        await until(
            lambda: len(server.gateway.registry.fleet.prefills) + len(server.gateway.registry.fleet.decodes) == 4
        )
        yield Cluster(sides[0], sides[2], server, client), sides


def test_another_instance_goes_on_at_once(model_folder: Path) -> None:
    async def test() -> None:
        async with four(model_folder, [decodes(2), decodes()]) as (c, sides):
            for _ in range(4):
                assert await told(c) == OUTPUT
            broken, healthy = sides[2:]
            assert all(request.attempt == 0 for request in broken.asked)
            assert [r.resumed for r in healthy.asked if r.attempt == 1] == [2] * len(broken.asked) != []

    run(test)


def test_hand_overs_that_keep_failing_keep_requests_away_and_no_client_notices(model_folder: Path) -> None:
    async def silent(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield died("its peer is silent", hand_over=True)

    async def test() -> None:
        async with four(model_folder, [silent, decodes()]) as (c, sides):
            for _ in range(40):
                assert await told(c) == OUTPUT
            assert len(sides[2].asked) < 12, "three of each pair, and a try now and then"

    run(test)
