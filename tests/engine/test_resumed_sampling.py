"""A request that resumes after n output tokens gets the tokens it would have got, for every n and every way to choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest
import torch

from consensus.entry import Key, PeerRef, RequestSpec, SamplingParams
from engine.sampler import sample
from engine.stage import Stage
from pipeline.outcome import Outcome
from pipeline.request import Request
from tests.engine.driver import PlainRow, Wish, load_split, run_stages
from tests.engine.tiny_models import VOCAB, Reference

EOS = (3,)
MAX_LEN = 200
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "top_p": {"temperature": 1.3, "top_p": 0.8, "seed": 8},
    "top_k": {"temperature": 1.1, "top_k": 20, "seed": 9},
    "min_p": {"temperature": 1.5, "min_p": 0.05, "seed": 10},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "penalties, seeded": {
        "temperature": 0.9, "seed": 11, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    },
    "min_tokens": {"min_tokens": 9, "logit_bias": ((EOS[0], 30.0),)},
    "stop ids after min_tokens": {"min_tokens": 5, "stop_token_ids": (17,), "logit_bias": ((17, 30.0),)},
    "logit_bias": {"temperature": 1.0, "seed": 12, "logit_bias": ((5, 4.0), (6, -9.0))},
    "logprobs": {"temperature": 1.0, "seed": 14, "logprobs": 3},
}  # fmt: skip


class Model(Protocol):
    def __call__(self, text: Sequence[int]) -> torch.Tensor:
        """Logits `[1, vocab]` of the token that follows `text`."""


def answer(
    model: Model, prompt: Sequence[int], told: Sequence[int], params: SamplingParams
) -> tuple[list[Any], Outcome]:
    """What an attempt tells that is given `told` of the output."""
    spec = RequestSpec(Key("r", 0), (*prompt, *told), params, PeerRef("p", "a", 1), 10**9, len(told))
    request, sampled = Request(spec, "running", 0, 1, 1, MAX_LEN), []
    while True:
        (chosen,) = sample(model((*spec.prompt, *request.output)), [request.sample(EOS)])
        request.output.append(chosen.token)
        sampled.append(chosen)
        outcome = request.finish(EOS)
        if outcome is not None:
            return sampled, outcome


def noise(text: Sequence[int]) -> torch.Tensor:
    """A model whose logits depend on the last two tokens and the place."""
    seed = (text[-1] * 131 + text[-2]) * 1009 + len(text)
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


class Staged:
    """A real stage; what it has not seen yet goes through it in chunks."""

    def __init__(self, stage: Stage, chunk: int) -> None:
        self._stage, self._chunk, self._seen = stage, chunk, 0

    def __call__(self, text: Sequence[int]) -> torch.Tensor:
        pages = list(range(self._stage.kv_pool.pages))
        while True:
            tokens = text[self._seen : self._seen + self._chunk]
            last = self._seen + len(tokens) == len(text)
            row = PlainRow(self._seen, tokens, pages, Wish() if last else None)
            logits = run_stages([self._stage], [row])
            self._seen += len(tokens)
            if last:
                return logits


@pytest.mark.parametrize("name", PARAMS)
def test_after_every_n_the_rest_is_the_same(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 24} | PARAMS[name])
    prompt = (40, 41, 42, 43)
    whole, outcome = answer(noise, prompt, (), params)
    assert len(whole) == outcome.output_tokens >= 6
    for n in range(1, len(whole)):
        rest, same = answer(noise, prompt, [one.token for one in whole[:n]], params)
        assert (rest, same) == (whole[n:], outcome), f"after {n}"


@pytest.mark.parametrize("name", PARAMS)
def test_after_every_n_the_rest_is_the_same_through_a_stage(tiny: Callable[[str], Reference], name: str) -> None:
    reference = tiny("llama")
    prompt = reference.prompts[1]
    params = SamplingParams(**{"max_tokens": 14} | PARAMS[name])

    def model() -> Staged:
        (stage,) = load_split(reference.folder, [(0, 4)], pages=8, page_size=16)
        return Staged(stage, chunk=5)

    whole, outcome = answer(model(), prompt, (), params)
    ids = [one.token for one in whole]
    for n in range(1, len(ids)):
        rest, same = answer(model(), prompt, ids[:n], params)
        assert [one.token for one in rest] == ids[n:], f"after {n}"
        assert same == outcome
        for one, wanted in zip(rest, whole[n:], strict=True):
            assert [i for i, _ in one.top] == [i for i, _ in wanted.top]
            assert one.logprob == pytest.approx(wanted.logprob, abs=1e-4)
