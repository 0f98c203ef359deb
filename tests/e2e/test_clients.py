"""The real `openai` client against a real cluster, and what its requests leave behind: nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.prompts import TEXTS, prompts, reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(smollm2: Path) -> Iterator[Cluster]:
    with Cluster(model=smollm2) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_a_chat_streams_with_usage_and_logprobs(cluster: Cluster, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=cluster.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=24,
        stream=True,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    told = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert all(t.logprob <= 0 and len(t.top_logprobs) == 2 for t in told)
    assert all(t.logprob == max(o.logprob for o in t.top_logprobs) for t in told), "greedy takes the likeliest"
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage is not None
    assert usage.completion_tokens == len(told) and usage.total_tokens == usage.prompt_tokens + len(told)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    cluster.assert_baseline()


def test_a_seed_makes_sampling_repeatable(cluster: Cluster, client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        return client.completions.create(
            model=cluster.model, prompt="Once upon a time", max_tokens=24, temperature=1.0, top_p=0.95, seed=seed
        ).choices[0].text  # fmt: skip

    assert ask(1) == ask(1) != ask(2)


def test_choices_are_those_of_single_requests_with_their_seeds(cluster: Cluster, client: openai.OpenAI) -> None:
    body = {"model": cluster.model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 1.0, "top_p": 0.95}
    alone = [client.completions.create(**body, seed=11 + i).choices[0].text for i in range(2)]
    together = client.completions.create(**body, seed=11, n=2, best_of=2)
    assert [choice.text for choice in together.choices] == alone and len(set(alone)) == 2
    assert together.usage.completion_tokens == 2 * 8
    streamed = ["", ""]
    for chunk in client.completions.create(**body, seed=11, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone
    cluster.assert_baseline()


def test_several_prompts_are_each_answered_as_the_reference_answers(
    cluster: Cluster, client: openai.OpenAI, smollm2: Path
) -> None:
    picked = [1, 2, 10]
    for asked in ([TEXTS[i] for i in picked], [prompts(smollm2)[i] for i in picked]):
        answer = client.completions.create(
            model=cluster.model, prompt=asked, temperature=0, max_tokens=12, extra_body={"min_tokens": 12, "return_token_ids": True}
        )  # fmt: skip
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        wanted = reference(smollm2, 64)
        assert [choice.to_dict()["token_ids"] for choice in answer.choices] == [wanted[i][:12] for i in picked]


def test_a_stop_string_ends_both_sides(cluster: Cluster, client: openai.OpenAI) -> None:
    body = {"model": cluster.model, "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 200}
    done = client.completions.create(**body, stop=["9"])
    assert done.choices[0].finish_reason == "stop" and "9" not in done.choices[0].text and "8" in done.choices[0].text
    cluster.assert_baseline()


def test_cancelled_streams_leave_nothing_behind(cluster: Cluster, client: openai.OpenAI, smollm2: Path) -> None:
    generated = cluster.counter("decode", "tokens_generated")
    for pause in (0.0, 0.05, 0.3, 1.0):
        stream = client.completions.create(
            model=cluster.model, prompt="Tell me everything.", max_tokens=4000, stream=True, temperature=0
        )
        for chunk, _ in zip(stream, range(1 + int(pause * 5)), strict=False):
            assert chunk.choices
        time.sleep(pause)
        stream.close()
    long = prompts(smollm2)[-1]
    for _ in range(3):  # cancelled while the prompt is still computed
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(model=cluster.model, prompt=long, max_tokens=500)
    cluster.assert_baseline()
    assert cluster.counter("decode", "tokens_generated") - generated < 1000, "cancelled requests went on"


def test_bad_requests_get_clear_errors_and_change_nothing(cluster: Cluster, client: openai.OpenAI) -> None:
    for prompt, message in (("", "empty"), ([1, 2, 10**6], "1000000"), ([5] * 9000, "8192")):
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(model=cluster.model, prompt=prompt, max_tokens=4)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=cluster.model, prompt="x", max_tokens=0)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x", max_tokens=4)
    cluster.assert_baseline()
