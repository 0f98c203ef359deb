"""The boundary of an instance: a `GenerateRequest` from the wire becomes a `RequestSpec`, or is refused.

In: a protobuf message of any content. Out: a spec that the ranks can run, or `Refused` with the
field, the value and the limit. Invariant: what passes here needs no further check behind it, as the
log would carry a bad value to every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from consensus.entry import Key, PeerRef, RequestSpec, SamplingParams
from paceline_proto.v1 import generation_pb2

_LONGEST_NAME = 256
_LONGEST_ID = 200  # with the attempt's number it names a room and a lease
_LONGEST_TIMEOUT_S = 86400.0
_LONGEST_TOKEN = 64
_MOST_LOGPROBS = 20
_MOST_IDS = 1024  # biased ids, stop ids
_SEEDS = 1 << 63


class Refused(Exception):
    """The request can never run here; the message says which field and the limit."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    instance: str
    vocab_size: int
    max_model_len: int
    page_size: int
    pages: int
    default_timeout_s: float


def spec_of(request: generation_pb2.GenerateRequest, limits: Limits) -> RequestSpec:
    """Raises `Refused`."""
    name = request.request_id
    if not 0 < len(name) <= _LONGEST_ID or not name.isascii() or not name.isprintable():
        raise Refused(f"request_id has {len(name)} characters; it needs 1 to {_LONGEST_ID}, printable ASCII ones")
    prompt = tuple(request.prompt_ids)
    if not prompt:
        raise Refused("prompt_ids is empty; a prompt has at least one token")
    _check_ids("prompt_ids", prompt, limits.vocab_size)
    params = _params_of(request.sampling, limits)
    if request.resumed >= min(len(prompt), params.max_tokens):
        raise Refused(
            f"resumed is {request.resumed}; it must be less than the {len(prompt)} prompt_ids that it is part of, "
            f"and than max_tokens, {params.max_tokens}"
        )
    _check_room(len(prompt), request.resumed, params.max_tokens, limits)
    peer = request.peer
    if not peer.instance_id or not peer.address or max(len(peer.instance_id), len(peer.address)) > _LONGEST_NAME:
        given = f"{peer.instance_id[:40]!r} and {peer.address[:40]!r}"
        raise Refused(f"peer needs instance_id and address of at most {_LONGEST_NAME} characters; they are {given}")
    if peer.instance_id == limits.instance:
        raise Refused(f"peer is {peer.instance_id!r}, which is this very instance; a pair is two instances")
    if len(request.room_token) > _LONGEST_TOKEN:
        raise Refused(f"room_token has {len(request.room_token)} bytes; at most {_LONGEST_TOKEN} are taken")
    timeout = request.timeout_s or limits.default_timeout_s
    _check_range("timeout_s", timeout, 0.001, _LONGEST_TIMEOUT_S)
    return RequestSpec(
        key=Key(request.request_id, request.attempt),
        prompt=prompt,
        params=params,
        peer=PeerRef(peer.instance_id, peer.address, peer.epoch),
        timeout=int(timeout * 1e6),
        resumed=request.resumed,
        token=request.room_token,
    )


def _params_of(wire: generation_pb2.SamplingParams, limits: Limits) -> SamplingParams:
    if wire.max_tokens < 1:
        raise Refused("sampling.max_tokens is 0; it must be at least 1")
    if wire.min_tokens > wire.max_tokens:
        raise Refused(f"sampling.min_tokens is {wire.min_tokens}, more than max_tokens {wire.max_tokens}")
    _check_range("sampling.temperature", wire.temperature, 0.0, 100.0)
    _check_range("sampling.top_p", wire.top_p, 0.0, 1.0, above=True)
    _check_range("sampling.min_p", wire.min_p, 0.0, 1.0)
    _check_range("sampling.repetition_penalty", wire.repetition_penalty, 0.01, 100.0)
    _check_range("sampling.presence_penalty", wire.presence_penalty, -2.0, 2.0)
    _check_range("sampling.frequency_penalty", wire.frequency_penalty, -2.0, 2.0)
    if wire.seed >= _SEEDS:
        raise Refused(f"sampling.seed is {wire.seed}; it must be below 2**63")
    if wire.HasField("logprobs") and wire.logprobs > _MOST_LOGPROBS:
        raise Refused(f"sampling.logprobs is {wire.logprobs}; at most {_MOST_LOGPROBS} are given")
    for name, size in (("logit_bias", len(wire.logit_bias)), ("stop_token_ids", len(wire.stop_token_ids))):
        if size > _MOST_IDS:
            raise Refused(f"sampling.{name} has {size} members; at most {_MOST_IDS} are taken")
    _check_ids("sampling.logit_bias", wire.logit_bias, limits.vocab_size)
    _check_ids("sampling.stop_token_ids", wire.stop_token_ids, limits.vocab_size)
    for token, bias in wire.logit_bias.items():
        _check_range(f"sampling.logit_bias[{token}]", bias, -100.0, 100.0)
    return SamplingParams(
        max_tokens=wire.max_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        seed=wire.seed,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=tuple(sorted(wire.logit_bias.items())),
        logprobs=wire.logprobs if wire.HasField("logprobs") else -1,
        min_tokens=wire.min_tokens,
        ignore_eos=wire.ignore_eos,
        stop_token_ids=tuple(sorted(set(wire.stop_token_ids))),
    )


def _check_room(given: int, resumed: int, max_tokens: int, limits: Limits) -> None:
    """The request fits the context and, alone, the pool; one that does not would wait for ever."""
    prompt = given - resumed
    if prompt + max_tokens > limits.max_model_len:
        raise Refused(
            f"prompt of {prompt} tokens and max_tokens {max_tokens} are {prompt + max_tokens} together, "
            f"but the context has {limits.max_model_len}"
        )
    positions, what = (given, "the prompt") if limits.role == "prefill" else (prompt + max_tokens, "prompt and output")
    pages = -(-positions // limits.page_size)
    if pages > limits.pages:
        raise Refused(
            f"{what} of {positions} tokens need {pages} pages of {limits.page_size}, but the pool has {limits.pages}"
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise Refused(f"{name} holds token id {largest}, but the vocabulary ends at {vocab_size - 1}")


def _check_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        lower = f"above {low:g}" if above else f"at least {low:g}"
        raise Refused(f"{name} is {value:g}; it must be {lower} and at most {high:g}")
