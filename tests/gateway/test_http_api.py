"""The API as OpenAI's own client sees it, over scripted instances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.model_files import ModelFiles
from paceline_proto.v1 import generation_pb2
from tests.gateway.scripted_cluster import cluster, run, until
from tests.gateway.scripted_instances import Kind, decode_saying, hang, outcome, prefill_saying, tells, tokens

HELLO: Any = [{"role": "user", "content": "hello"}]
TEXT = "One 漢字 👩‍👩‍👧‍👦 and क्षत्रिय."
EOS = 2


@pytest.fixture(scope="module")
def ids(files: ModelFiles) -> list[int]:
    return [*files.encode(TEXT, add_special_tokens=False), EOS]


def test_chat_streams_and_counts(model_folder: Path, files: ModelFiles, ids: list[int]) -> None:
    async def test() -> None:
        # Decode tells the first token again: it must not come twice.
        async with cluster(model_folder, prefill_saying(ids[0]), decode_saying(ids, first=True)) as c:
            options: Any = {"include_usage": True, "continuous_usage_stats": True}
            stream = await c.client.chat.completions.create(
                model="m", messages=HELLO, stream=True, stream_options=options
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == TEXT
            assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
            assert chunks[-1].choices == []
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.completion_tokens == len(ids)
            counts = [chunk.usage.completion_tokens for chunk in chunks[1:] if chunk.usage]
            assert counts == sorted(counts)
            assert counts[0] < len(ids)
            assert {chunk.id for chunk in chunks} == {f"chatcmpl-{c.prefill.asked[0].request_id}"}

            asked, twin = c.prefill.asked[0], c.decode.asked[0]
            rendered = files.encode(files.render_chat(HELLO), add_special_tokens=False)
            assert list(asked.prompt_ids) == rendered
            assert usage.prompt_tokens == len(rendered)
            assert (asked.request_id, asked.attempt) == (twin.request_id, twin.attempt)
            assert (asked.peer.instance_id, asked.peer.address, asked.peer.epoch) == ("d0", c.decode.address, 7)
            assert (twin.peer.instance_id, twin.peer.address, twin.peer.epoch) == ("p0", c.prefill.address, 7)
            assert asked.sampling == twin.sampling
            assert asked.sampling.max_tokens == 512 - len(rendered)
            assert 590 < asked.timeout_s <= 600

    run(test)


def test_whole_answers(model_folder: Path, files: ModelFiles, ids: list[int]) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefill_saying(ids[0]), decode_saying(ids, Kind.KIND_LENGTH)) as c:
            chat = await c.client.chat.completions.create(model="m", messages=HELLO)
            assert chat.choices[0].message.content == TEXT
            assert chat.choices[0].finish_reason == "length"
            assert chat.usage is not None
            assert chat.usage.completion_tokens == len(ids)
            prompt = files.encode("say it", add_special_tokens=True)
            for form in ("say it", ["say it"], prompt, [prompt]):
                whole = await c.client.completions.create(model="m", prompt=form, echo=True, max_tokens=99)
                assert whole.choices[0].text == "say it" + TEXT
                assert list(c.prefill.asked[-1].prompt_ids) == prompt
                assert c.prefill.asked[-1].sampling.max_tokens == 99
            with pytest.raises(openai.InternalServerError, match="decode side: told a token at position 16 of at most"):
                await c.client.completions.create(model="m", prompt="say it")
            assert c.prefill.asked[-1].sampling.max_tokens == 16
            stream = await c.client.completions.create(
                model="m", prompt="say it", echo=True, stream=True, max_tokens=99
            )
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "say it" + TEXT
            assert c.prefill.asked[-1].sampling.seed != c.prefill.asked[-2].sampling.seed, "fresh unless given"
        assert all(c.server.gateway.router.load_of(i).requests == 0 for i in c.server.gateway.registry.fleet.prefills)

    run(test)


def test_stop_strings_across_tokens_end_both_sides(model_folder: Path, files: ModelFiles) -> None:
    async def test() -> None:
        story = files.encode("one two three four five", add_special_tokens=False)
        talks_on = decode_saying([*story, *story * 50], pause_s=0.01)
        async with cluster(model_folder, prefill_saying(story[0]), talks_on) as c:
            for stream in (True, False):
                answer: Any = await c.client.completions.create(
                    model="m", prompt="x", max_tokens=400, stop=["ee fo", "zz"], stream=stream
                )
                choices = [chunk.choices[0] async for chunk in answer] if stream else [answer.choices[0]]
                assert "".join(choice.text for choice in choices) == "one two thr"
                assert choices[-1].finish_reason == "stop"
            await until(lambda: len(c.decode.aborts) == 2 and c.decode.running == 0)
            assert {abort.reason for abort in c.decode.aborts} == {"stop string"}
            assert [abort.request_id for abort in c.decode.aborts] == [asked.request_id for asked in c.decode.asked]

    run(test)


def test_first_token_may_be_the_last(model_folder: Path) -> None:
    async def test() -> None:
        ends = tells(tokens(0, EOS), outcome(Kind.KIND_STOP, count=1))
        async with cluster(model_folder, ends, hang) as c:
            answer = await c.client.completions.create(model="m", prompt="x")
            assert answer.choices[0].text == ""
            assert answer.choices[0].finish_reason == "stop"
            # Decode had its time to say so too, and is then ended.
            await until(lambda: c.decode.running == 0)
            assert [abort.reason for abort in c.decode.aborts] == ["the request has ended"]

    run(test)


def logprob_token(token: int, logprob: float, *top: tuple[int, float]) -> generation_pb2.Token:
    best = [generation_pb2.TopLogprob(id=i, logprob=p) for i, p in top]
    return generation_pb2.Token(id=token, logprob=logprob, top=best)


def test_logprobs(model_folder: Path, files: ModelFiles) -> None:
    async def test() -> None:
        a, b = files.encode("a é", add_special_tokens=False)[0], files.encode("é", add_special_tokens=False)[0]
        part = files.encode("漢", add_special_tokens=False)[0]
        told = [
            logprob_token(a, -0.5, (a, -0.5), (b, -1.5)),
            logprob_token(part, -2.0, (b, -0.25), (a, -3)),
            logprob_token(EOS, -0.125, (EOS, -0.125)),
        ]
        async with cluster(model_folder, prefill_saying(told[0]), decode_saying(told)) as c:
            chat = await c.client.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=1)
            assert c.decode.asked[0].sampling.logprobs == 1
            assert chat.choices[0].logprobs is not None
            content = chat.choices[0].logprobs.content
            assert content is not None
            assert [entry.token for entry in content][::2] == ["a", "<|im_end|>"]
            assert [entry.logprob for entry in content] == [-0.5, -2.0, -0.125]
            assert content[0].bytes == [97]
            assert bytes(content[1].bytes or []) == files.vocabulary.raw_bytes(part)
            assert [top.token for top in content[1].top_logprobs] == ["é"]

            stream = await c.client.chat.completions.create(model="m", messages=HELLO, logprobs=True, stream=True)
            entries = [e async for k in stream if (lp := k.choices[0].logprobs) for e in lp.content or []]
            assert [entry.logprob for entry in entries] == [-0.5, -2.0, -0.125]
            assert entries[0].top_logprobs == []

            text = await c.client.completions.create(model="m", prompt="x", logprobs=2)
            logprobs = text.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.token_logprobs == [-0.5, -2.0, -0.125]
            assert logprobs.top_logprobs is not None
            assert logprobs.top_logprobs[0] == {"a": -0.5, "é": -1.5}
            assert logprobs.tokens is not None
            assert logprobs.tokens[1].startswith("bytes:\\x")
            assert logprobs.text_offset == [0, 1, 1]

    run(test)


def test_errors_have_openais_shape(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, hang, hang, max_body_bytes=2000) as c:
            with pytest.raises(openai.NotFoundError) as missing:
                await c.client.completions.create(model="other", prompt="x")
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as empty:
                await c.client.completions.create(model="m", prompt="")
            assert empty.value.param == "prompt"
            with pytest.raises(openai.BadRequestError) as long:
                await c.client.completions.create(model="m", prompt="x", max_tokens=600)
            assert "600" in long.value.message
            assert "512" in long.value.message
            with pytest.raises(openai.BadRequestError):
                await c.client.completions.create(model="m", prompt=[49152])
            with pytest.raises(openai.APIStatusError) as large:
                await c.client.completions.create(model="m", prompt="x" * 3000)
            assert large.value.status_code == 413
            with pytest.raises(openai.NotFoundError) as nowhere:
                await c.client.embeddings.create(model="m", input="x")
            assert nowhere.value.body
            assert c.prefill.asked == []

    run(test)


def test_the_other_routes(model_folder: Path, files: ModelFiles, ids: list[int]) -> None:
    async def test() -> None:
        async with (
            cluster(model_folder, prefill_saying(ids[0]), decode_saying(ids)) as c,
            aiohttp.ClientSession(c.url) as http,
        ):
            listed = await c.client.models.list()
            assert [model.id for model in listed.data] == ["m"]
            assert (await c.client.models.retrieve("m")).to_dict()["max_model_len"] == 512
            with pytest.raises(openai.NotFoundError):
                await c.client.models.retrieve("n")
            async with http.get("/health") as answer:
                assert (answer.status, (await answer.json())["status"]) == (200, "ok")
            async with http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}) as answer:
                body = await answer.json()
                assert (body["tokens"], body["count"], body["max_model_len"]) == (ids[:-1], len(ids) - 1, 512)
            async with http.post("/tokenize", json={"model": "m", "messages": HELLO}) as answer:
                rendered = files.encode(files.render_chat(HELLO), add_special_tokens=False)
                assert (await answer.json())["tokens"] == rendered
            async with http.post("/detokenize", json={"tokens": ids}) as answer:
                assert await answer.json() == {"prompt": TEXT + "<|im_end|>"}
            async with http.post("/detokenize", json={"tokens": [-1]}) as answer:
                assert answer.status == 400
            headers, streamed = {"X-Request-Id": "mine"}, {"prompt": "x", "stream": True, "max_tokens": 99}
            async with http.post("/v1/completions", json=streamed, headers=headers) as answer:
                raw = await answer.read()
                assert raw.endswith(b"data: [DONE]\n\n")
                assert all(json.loads(line[6:]) for line in raw.split(b"\n\n")[:-2])
                assert answer.headers["X-Request-Id"] == "mine"
                assert answer.headers["X-Paceline-Prefill"] == "p0"
                assert answer.headers["X-Paceline-Decode"] == "d0"
                assert answer.headers["X-Paceline-Mode"] == "disaggregated"
            assert c.prefill.asked[0].request_id != "mine"
            async with http.post("/v1/completions", data=b"{") as answer:
                assert answer.status == 400
                assert len(answer.headers["X-Request-Id"]) == 32
            async with http.get("/metrics") as answer:
                text = await answer.text()
            for line in (
                'paceline_gateway_requests_total{endpoint="completions",outcome="stop"} 1.0',
                'paceline_gateway_requests_total{endpoint="completions",outcome="rejected"} 1.0',
                "paceline_gateway_requests_in_flight 0.0",
                "paceline_gateway_time_to_first_token_seconds_count 1.0",
                f"paceline_gateway_inter_token_seconds_count {len(ids) - 1}.0",
                f"paceline_gateway_output_tokens_total {len(ids)}.0",
                "paceline_gateway_prompt_tokens_total 1.0",
                'paceline_gateway_serving_instances{role="decode"} 1.0',
            ):
                assert line in text

    run(test)
