"""From a parsed request and its prompt's token ids to the job an instance can run.

In: a request, token ids, the model's limits. Out: a `Job`, complete and checked, or an `ApiError`
(400). Pure: a seed for clients that gave none is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def make_job(request: GenerationRequest, prompt_ids: Sequence[int], limits: Limits, fresh_seed: int) -> Job:
    prompt_param = "messages" if isinstance(request, ChatRequest) else "prompt"
    _check_prompt(prompt_ids, limits, prompt_param)
    max_tokens = _max_tokens(request, len(prompt_ids), limits, prompt_param)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", "min_tokens")
    sampling = Sampling(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),  # -1 is another way to say "off"
        min_p=_or(request.min_p, 0.0),
        seed=(fresh_seed if request.seed is None else request.seed) & _SEED_MASK,
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
    return Job(prompt_ids, sampling, request.stops)


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


def _max_tokens(request: GenerationRequest, prompt: int, limits: Limits, prompt_param: str) -> int:
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
            prompt_param,
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
