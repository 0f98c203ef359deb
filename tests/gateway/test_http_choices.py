"""Several choices and several prompts in one request, over scripted instances whose tokens tell the seed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest

from gateway.model_files import ModelFiles
from paceline_proto.v1 import generation_pb2
from tests.gateway.scripted_cluster import cluster, run, until
from tests.gateway.scripted_instances import Kind, hang, outcome, refuses, tokens

HELLO: Any = [{"role": "user", "content": "hello"}]
SEED, COUNT = 100, 3


def spelled(prompt: list[int], seed: int) -> list[int]:
    """The output of the scripts below: other tokens for every prompt and seed."""
    return [1000 + 50 * (seed - SEED) + 10 * (sum(prompt) % 5) + at for at in range(COUNT)]


async def prefill_by_seed(request: Any, _: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
    yield tokens(0, spelled(request.prompt_ids, request.sampling.seed)[0])
    yield outcome(Kind.KIND_HANDED_OVER)


async def decode_by_seed(request: Any, _: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
    for at, token in list(enumerate(spelled(request.prompt_ids, request.sampling.seed)))[1:]:
        await asyncio.sleep(0)
        yield tokens(at, token)
    yield outcome(Kind.KIND_LENGTH, count=COUNT)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_chat(model_folder: Path, files: ModelFiles, stream: bool) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefill_by_seed, decode_by_seed) as c:
            options: Any = {"include_usage": True, "continuous_usage_stats": True}
            answer: Any = await c.client.chat.completions.create(
                model="m", messages=HELLO, n=3, seed=SEED, stream=stream, stream_options=options if stream else None
            )
            prompt = files.encode(files.render_chat(HELLO), add_special_tokens=False)
            expected = [files.vocabulary.decode(spelled(prompt, SEED + index)) for index in range(3)]
            if stream:
                texts, reasons, roles, counts = ["", "", ""], ["", "", ""], [0, 0, 0], []
                async for chunk in answer:
                    counts += [chunk.usage.completion_tokens] if chunk.usage else []
                    for choice in chunk.choices:
                        texts[choice.index] += choice.delta.content or ""
                        reasons[choice.index] += choice.finish_reason or ""
                        roles[choice.index] += choice.delta.role is not None
                assert (chunk.choices, roles) == ([], [1, 1, 1])
                assert counts == sorted(counts) and counts[0] < counts[-1], "a running sum over all choices"
                usage = chunk.usage
            else:
                assert [choice.index for choice in answer.choices] == [0, 1, 2]
                texts = [choice.message.content for choice in answer.choices]
                reasons = [choice.finish_reason for choice in answer.choices]
                usage = answer.usage
            assert (texts, reasons) == (expected, ["length"] * 3)
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 3 * COUNT)
            assert [request.sampling.seed for request in c.prefill.asked] == [SEED, SEED + 1, SEED + 2]
            assert len({request.request_id for request in c.prefill.asked}) == 3
            await until(lambda: c.server.gateway.in_flight == 0)

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices(model_folder: Path, files: ModelFiles, stream: bool) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefill_by_seed, decode_by_seed) as c:
            text = files.encode("say it", add_special_tokens=True)
            other = files.encode("and that", add_special_tokens=True)
            for prompts in (["say it", "and that"], [text, other]):
                answer: Any = await c.client.completions.create(
                    model="m", prompt=prompts, n=2, best_of=2, seed=SEED, echo=True, stream=stream
                )
                expected = [
                    echo + files.vocabulary.decode(spelled(prompt, seed))
                    for echo, prompt in (("say it", text), ("and that", other))
                    for seed in (SEED, SEED + 1)
                ]
                texts = [""] * 4
                if stream:
                    async for chunk in answer:
                        texts[chunk.choices[0].index] += chunk.choices[0].text
                else:
                    texts = [choice.text for choice in answer.choices]
                    usage = answer.usage
                    assert (usage.prompt_tokens, usage.completion_tokens) == (len(text) + len(other), 4 * COUNT)
                assert texts == expected

    run(test)


def test_a_slow_choice_holds_up_no_other(model_folder: Path) -> None:
    async def test() -> None:
        others_are_done = asyncio.Event()

        async def decode(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
            if request.sampling.seed == SEED:
                await others_are_done.wait()
            async for response in decode_by_seed(request, context):
                yield response

        async with cluster(model_folder, prefill_by_seed, decode) as c:
            stream = await c.client.completions.create(model="m", prompt="x", n=3, seed=SEED, stream=True)
            ended = []
            async for chunk in stream:
                ended += [choice.index for choice in chunk.choices if choice.finish_reason]
                if len(ended) == 2:
                    others_are_done.set()
            assert sorted(ended[:2]) == [1, 2] and ended[2:] == [0]

    run(test)


def breaks_at(seed: int, *before: generation_pb2.GenerateResponse) -> Any:
    """That choice fails; the others tell a token and go on for ever."""
    fails = refuses(grpc.StatusCode.INTERNAL, "rank 1 died", *before)

    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        if request.sampling.seed == seed:
            async for response in fails(request, context):
                yield response
        yield tokens(1, 1000)
        await asyncio.Event().wait()

    return script


def test_one_choice_that_fails_fails_the_request_and_ends_the_others(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefill_by_seed, breaks_at(SEED + 1), resumes=0) as c:
            with pytest.raises(openai.InternalServerError, match="rank 1 died"):
                await c.client.completions.create(model="m", prompt="x", n=3, seed=SEED)
            await until(lambda: c.decode.running == 0 and len(c.decode.aborts) == 2)
            assert {abort.reason for abort in c.decode.aborts} == {"another choice of its request failed"}
            await until(lambda: c.server.gateway.in_flight == 0)

    run(test)


def test_one_choice_that_fails_ends_the_stream_with_one_error_event(model_folder: Path) -> None:
    async def test() -> None:
        breaks = breaks_at(SEED + 1, tokens(1, 1001))
        async with (
            cluster(model_folder, prefill_by_seed, breaks, resumes=0) as c,
            aiohttp.ClientSession(c.url) as http,
        ):
            body = {"prompt": "x", "stream": True, "n": 3, "seed": SEED}
            async with http.post("/v1/completions", json=body) as answer:
                *events, nothing = (await answer.read()).split(b"\n\n")
            bodies = [json.loads(event.removeprefix(b"data: ")) for event in events]
            assert nothing == b"" and all("choices" in body for body in bodies[:-1])
            assert "rank 1 died" in bodies[-1]["error"]["message"]
            await until(lambda: c.decode.running == 0 and len(c.decode.aborts) == 2)
            assert {abort.reason for abort in c.decode.aborts} == {"another choice of its request failed"}
            async with http.get("/metrics") as answer:
                assert 'requests_total{endpoint="completions",outcome="failed"} 1.0' in await answer.text()

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_all_choices(model_folder: Path, stream: bool) -> None:
    async def test() -> None:
        async with (
            cluster(model_folder, prefill_by_seed, hang) as c,
            aiohttp.ClientSession(c.url) as http,
        ):
            body = {"prompt": ["x", "y"], "n": 2, "seed": SEED, "stream": stream}
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            await until(lambda: c.decode.running == 4)
            if stream:
                (await asking).close()
            asking.cancel()
            await until(lambda: c.decode.running == 0 and len(c.decode.aborts) == 4)
            assert {abort.reason for abort in c.decode.aborts} == {"client went away"}
            await until(lambda: c.server.gateway.in_flight == 0)

    run(test)


def test_every_choice_counts_against_the_limit(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, hang, hang, max_inflight=3) as c:
            with pytest.raises(openai.BadRequestError, match="4 choices, but at most 3"):
                await c.client.completions.create(model="m", prompt="x", n=4)
            waiting = asyncio.create_task(c.client.completions.create(model="m", prompt="x", n=2))
            await until(lambda: c.server.gateway.in_flight == 2)
            with pytest.raises(openai.RateLimitError):
                await c.client.completions.create(model="m", prompt="x", n=2)
            assert c.server.gateway.in_flight == 2, "a refused request gives its place back"
            waiting.cancel()
            await until(lambda: c.server.gateway.in_flight == 0)
            assert len(c.prefill.asked) == 2

    run(test)
