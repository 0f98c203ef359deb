"""From a parsed request and its prompts' token ids to the jobs that instances can run.

In: a request, token ids, the model's limits. Out: one `Job` per choice, complete and checked, or an
`ApiError` (400). Pure: a seed for clients that gave none is handed in. Choice j of a prompt is what a
request for one choice with the seed + j would be; without a seed, all choices of the request differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.errors import invalid
from gateway.openai_api import ChatRequest, GenerationRequest

COMPLETION_TOKENS = 16  # what OpenAI's completions endpoint generates unless told otherwise
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt and its output must fit into."""

    max_model_len: int
    vocab_size: int
    common_len: int = 0  # what fits every pair; a request that names no limit of its own asks for no more


@dataclass(frozen=True, slots=True)
class Sampling:
    """Fields and meanings are the wire's SamplingParams."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int | None
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    prompt_ids: Sequence[int]
    sampling: Sampling
    stops: tuple[str, ...]


def make_jobs(
    request: GenerationRequest, prompts: Sequence[Sequence[int]], limits: Limits, fresh_seed: int
) -> list[Job]:
    """The jobs of all choices, in the order of their indexes: prompt by prompt."""
    jobs: list[Job] = []
    for at, prompt_ids in enumerate(prompts):
        param = _prompt_param(request, at, len(prompts))
        _check_prompt(prompt_ids, limits, param)
        sampling = _sampling(request, len(prompt_ids), limits)
        for choice in range(request.choices_per_prompt):
            seed = fresh_seed + len(jobs) if request.seed is None else request.seed + choice
            jobs.append(Job(prompt_ids, replace(sampling, seed=seed & _SEED_MASK), request.stops))
    return jobs


def _prompt_param(request: GenerationRequest, at: int, prompts: int) -> str:
    if isinstance(request, ChatRequest):
        return "messages"
    return "prompt" if prompts == 1 else f"prompt[{at}]"


def _sampling(request: GenerationRequest, prompt: int, limits: Limits) -> Sampling:
    """Everything but the seed, which each choice has its own of."""
    max_tokens = _max_tokens(request, prompt, limits)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", "min_tokens")
    return Sampling(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),  # -1 is another way to say "off"
        min_p=_or(request.min_p, 0.0),
        seed=0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request, limits),
        logprobs=request.wanted_logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=_stop_token_ids(request, limits),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _check_prompt(prompt_ids: Sequence[int], limits: Limits, param: str) -> None:
    if not prompt_ids:
        raise invalid("the prompt is empty", param)
    for at, token in enumerate(prompt_ids):
        if not 0 <= token < limits.vocab_size:
            raise invalid(f"prompt token {at} is {token}, but ids go from 0 to {limits.vocab_size - 1}", param)
    if len(prompt_ids) >= limits.max_model_len:
        raise invalid(
            f"the prompt has {len(prompt_ids)} tokens, which leaves no room for output in the context of "
            f"{limits.max_model_len} tokens",
            param,
            "context_length_exceeded",
        )


def _max_tokens(request: GenerationRequest, prompt: int, limits: Limits) -> int:
    room = limits.max_model_len - prompt
    wanted = request.wanted_tokens
    if wanted is None:
        if limits.common_len > prompt:
            room = min(room, limits.common_len - prompt)
        return room if isinstance(request, ChatRequest) else min(room, COMPLETION_TOKENS)
    param, tokens = wanted
    if tokens > room:
        raise invalid(
            f"the prompt has {prompt} tokens and {param} asks for {tokens}: together {prompt + tokens}, "
            f"but the context holds {limits.max_model_len}",
            param,
            "context_length_exceeded",
        )
    return tokens


def _logit_bias(request: GenerationRequest, limits: Limits) -> tuple[tuple[int, float], ...]:
    pairs = {int(key): bias for key, bias in (request.logit_bias or {}).items()}
    for token in pairs:
        if token >= limits.vocab_size:
            raise invalid(f"logit_bias names token {token}, but ids end at {limits.vocab_size - 1}", "logit_bias")
    return tuple(sorted(pairs.items()))


def _stop_token_ids(request: GenerationRequest, limits: Limits) -> tuple[int, ...]:
    ids = tuple(request.stop_token_ids or ())
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            last = limits.vocab_size - 1
            raise invalid(f"stop_token_ids holds {token}, but ids go from 0 to {last}", "stop_token_ids")
    return ids
