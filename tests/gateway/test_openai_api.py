"""Reading request bodies: what is accepted, and which field an error names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.generation_job import Job, Limits, make_job
from gateway.openai_api import (
    parse_chat,
    parse_completion,
    parse_tokenize,
    plain_messages,
    prompt_of,
)

LIMITS = Limits(max_model_len=100, vocab_size=1000)
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello"} | fields).encode()


def job(body: bytes, prompt: int = 10) -> Job:
    parsed = parse_chat(body) if b"messages" in body else parse_completion(body)
    return make_job(parsed, [1] * prompt, LIMITS, fresh_seed=42)


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
    assert job(chat(frobnicate=True, tools=[], response_format={"type": "text"}, **nulls))


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
        (completion(n=2), "n"),
        (chat(n=0), "n"),
        (completion(best_of=2), "best_of"),
        (completion(suffix="x"), "suffix"),
        (completion(logprobs=21), "logprobs"),
        (completion(logprobs=True), "logprobs"),
        (completion(echo=True, logprobs=0), "echo"),
        (chat(logprobs=1), "logprobs"),
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat(tools=[{"type": "function"}]), "tools"),
        (chat(response_format={"type": "json_object"}), "response_format"),
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


def test_too_long_names_both_numbers() -> None:
    error = refusal(completion(max_tokens=91))
    assert error.code == "context_length_exceeded"
    for number in ("10 tokens", "91", "101", "100"):
        assert number in error.message
    with pytest.raises(ApiError, match="the prompt has 100 tokens"):
        job(chat(), prompt=100)


def test_prompts() -> None:
    def prompt(value: Any) -> str | list[int]:
        return prompt_of(parse_completion(completion(prompt=value)))

    assert prompt("a") == prompt(["a"]) == "a"
    assert prompt([1, 2]) == prompt([[1, 2]]) == [1, 2]
    for wrong in (["a", "b"], [[1], [2]], 5, None, [1, "a"], [True], {"a": 1}, [1.5]):
        with pytest.raises(ApiError) as caught:
            prompt(wrong)
        assert caught.value.param == "prompt"


@pytest.mark.parametrize("ids", [[], [1, -1], [1000], [2**70]])
def test_prompt_ids_are_checked(ids: list[int]) -> None:
    with pytest.raises(ApiError) as caught:
        make_job(parse_completion(completion(prompt=ids)), ids, LIMITS, 0)
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
