"""Reading request bodies: what is accepted, and which field an error names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.generation_job import Job, Limits, make_jobs
from gateway.openai_api import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
    parse_chat,
    parse_completion,
    parse_tokenize,
    plain_messages,
    prompts_of,
)

LIMITS = Limits(max_model_len=100, vocab_size=1000)
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello"} | fields).encode()


def job(body: bytes, prompt: int = 10) -> Job:
    return jobs(body, [1] * prompt)[0]


def jobs(body: bytes, *prompts: list[int]) -> list[Job]:
    parsed = parse_chat(body) if b"messages" in body else parse_completion(body)
    return make_jobs(parsed, prompts, LIMITS, fresh_seed=42)


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        job(body)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["type"] == "invalid_request_error"
    return caught.value


def test_defaults() -> None:
    sampling = job(completion()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs, sampling.seed) == (16, 0, None, 42)
    assert sampling.repetition_penalty == 1.0
    assert job(chat()).sampling.max_tokens == 90, "chat fills the context"
    assert job(completion(), prompt=95).sampling.max_tokens == 5, "a default limit never fails"


def test_everything_given() -> None:
    given = job(
        chat(
            max_completion_tokens=7, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, repetition_penalty=1.2,
            presence_penalty=-2, frequency_penalty=2, logit_bias={"5": 3, "2": -100}, stop=["a", "b"],
            stop_token_ids=[3], min_tokens=2, ignore_eos=True, logprobs=True, top_logprobs=4, n=1, max_tokens=3,
        )
    )  # fmt: skip
    sampling = given.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, 0.5, 0)
    assert sampling.seed == 2**63 - 1, "any integer is a seed"
    assert sampling.logit_bias == ((2, -100.0), (5, 3.0))
    assert (given.stops, sampling.stop_token_ids, sampling.min_tokens) == (("a", "b"), (3,), 2)
    assert (sampling.ignore_eos, sampling.logprobs) == (True, 4)


def test_unknown_and_null_fields_are_fine() -> None:
    nulls = dict.fromkeys(("logprobs", "stop", "seed", "max_tokens", "stream_options", "logit_bias", "n", "top_p"))
    assert job(completion(best_of=1, frobnicate={"x": 1}, user="me", **nulls)).sampling.max_tokens == 16
    assert job(chat(frobnicate=True, tools=[], tool_choice="auto", response_format={"type": "text"}, **nulls))
    assert job(chat(tools=[{"type": "function"}], tool_choice="none", skip_special_tokens=True, suffix=""))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (completion(max_tokens="9"), "max_tokens"),
        (completion(max_tokens=0), "max_tokens"),
        (chat(max_completion_tokens=0), "max_completion_tokens"),
        (completion(temperature=-0.1), "temperature"),
        (completion(temperature="hot"), "temperature"),
        (completion(top_p=0), "top_p"),
        (completion(top_p=1.1), "top_p"),
        (completion(top_k=-2), "top_k"),
        (completion(min_p=2), "min_p"),
        (completion(repetition_penalty=0), "repetition_penalty"),
        (completion(presence_penalty=3), "presence_penalty"),
        (completion(frequency_penalty=-3), "frequency_penalty"),
        (completion(min_tokens=-1), "min_tokens"),
        (completion(min_tokens=17), "min_tokens"),
        (completion(logit_bias={"x": 1}), "logit_bias"),
        (completion(logit_bias={"9" * 5000: 1}), "logit_bias"),
        (completion(logit_bias={"1000": 1}), "logit_bias"),
        (completion(logit_bias={"1": 101}), "logit_bias"),
        (completion(stop=["x"] * 17), "stop"),
        (completion(stop=""), "stop"),
        (completion(stop=[1]), "stop[0]"),
        (completion(stop_token_ids=[1000]), "stop_token_ids"),
        (completion(n=129), "n"),
        (chat(n=0), "n"),
        (completion(best_of=2), "best_of"),
        (completion(n=2, best_of=3), "best_of"),
        (completion(suffix="x"), "suffix"),
        (completion(logprobs=21), "logprobs"),
        (completion(logprobs=True), "logprobs"),
        (completion(echo=True, logprobs=0), "echo"),
        (chat(logprobs=1), "logprobs"),
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat(tools=[{"type": "function"}]), "tools"),
        (chat(response_format={"type": "json_object"}), "response_format"),
        (chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(functions=[{"name": "f"}]), "functions"),
        (completion(prompt_logprobs=0), "prompt_logprobs"),
        (completion(use_beam_search=True), "use_beam_search"),
        (completion(guided_regex="a+"), "guided_regex"),
        (completion(skip_special_tokens=False), "skip_special_tokens"),
        (chat(stream="yes"), "stream"),
        (chat(stream_options={"include_usage": 1}), "stream_options.include_usage"),
        (chat(messages=[]), "messages"),
        (chat(messages="hello"), "messages"),
        (chat(messages=["hello"]), "messages[0]"),
        (chat(messages=[{"content": "x"}]), "messages[0].role"),
        (chat(messages=[{"role": "usr", "content": "x"}]), "messages[0].role"),
        (chat(messages=[{"role": "user", "contnt": "x"}]), "messages[0].content"),
        (chat(messages=[*HELLO, {"role": "user", "content": 1}]), "messages[1].content"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0]"),
        (b'{"messages_": 1, "messages": null}', "messages"),
        (b'{"max_tokens": 3}', "prompt"),
        (b"{", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_refusals_name_the_field(body: bytes, param: str | None) -> None:
    assert refusal(body).param == param


@pytest.mark.parametrize("body", [b"[]", b'"hello"', b"7", b"null"])
def test_a_body_that_is_no_object_is_said(body: bytes) -> None:
    assert refusal(body).message.startswith("the body must be a JSON object: expected `object`, got `")


def test_too_long_names_both_numbers() -> None:
    error = refusal(completion(max_tokens=91))
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    for number in ("10 tokens", "91", "101", "100"):
        assert number in error.message
    with pytest.raises(ApiError, match="the prompt has 100 tokens"):
        job(chat(), prompt=100)


def test_prompts() -> None:
    def prompts(value: Any, **fields: Any) -> list[str | list[int]]:
        return prompts_of(parse_completion(completion(prompt=value, **fields)))

    assert prompts("a") == prompts(["a"]) == ["a"]
    assert prompts([1, 2]) == prompts([[1, 2]]) == [[1, 2]]
    assert prompts([]) == [[]], "one prompt, which is then found to be empty"
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([[1], [2, 3], "c"]) == [[1], [2, 3], "c"]
    wrong: list[tuple[Any, str]] = [
        (5, "prompt"), (None, "prompt"), ([1, "a"], "prompt"), ([True], "prompt"), ({"a": 1}, "prompt"),
        ([1.5], "prompt"), (["a", 1], "prompt[1]"), ([[1], [1, "a"]], "prompt[1]"), (["a"] * 129, "prompt"),
    ]  # fmt: skip
    for value, param in wrong:
        with pytest.raises(ApiError) as caught:
            prompts(value)
        assert caught.value.param == param
    with pytest.raises(ApiError, match="130 choices"):
        prompts(["a", "b"], n=65)


def test_choices_are_what_single_requests_with_their_seeds_would_be() -> None:
    two = jobs(completion(n=2, seed=7, max_tokens=5), [1], [2, 2])
    assert [(list(j.prompt_ids), j.sampling.seed) for j in two] == [([1], 7), ([1], 8), ([2, 2], 7), ([2, 2], 8)]
    for each in two:
        alone = jobs(completion(seed=each.sampling.seed, max_tokens=5), list(each.prompt_ids))
        assert alone == [each]
    unseeded = jobs(chat(n=3), [1])
    assert [j.sampling.seed for j in unseeded] == [42, 43, 44]
    several = jobs(completion(), [1], [1])
    assert several[0].sampling.seed != several[1].sampling.seed, "the same prompt twice gives two answers"
    assert jobs(completion(seed=2**63 - 1, n=2), [1])[1].sampling.seed == 0, "seeds stay in the wire's range"


def test_of_several_prompts_the_wrong_one_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        jobs(completion(), [1], [])
    assert caught.value.param == "prompt[1]"
    with pytest.raises(ApiError, match="leaves no room") as caught:
        jobs(completion(), [1] * 100, [1])
    assert caught.value.param == "prompt[0]"


@pytest.mark.parametrize("ids", [[], [1, -1], [1000], [2**70]])
def test_prompt_ids_are_checked(ids: list[int]) -> None:
    with pytest.raises(ApiError) as caught:
        jobs(completion(prompt=ids), ids)
    assert caught.value.param == "prompt"


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = parse_chat(chat(messages=[{"role": "user", "content": parts, "name": "x"}])).messages
    assert plain_messages(messages) == [{"role": "user", "content": "a\nb", "name": "x"}]
    assert plain_messages([{"role": "assistant", "content": None}])[0]["content"] == ""


def test_tokenize_wants_one_of_two() -> None:
    for body in (b"{}", b'{"prompt": "a", "messages": [{"role": "user", "content": "x"}]}'):
        with pytest.raises(ApiError, match="either prompt or messages"):
            parse_tokenize(body)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, StreamOptions])
def test_every_field_that_is_read_is_documented(kind: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert [name for name in kind.__struct_fields__ if f"`{name}" not in text] == []
