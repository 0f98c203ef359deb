"""The bodies of a run's requests, made before it begins, so that the run itself only sends.

In: asks, and how to ask this server. Out: bytes. Recipes become token ids or text of exactly their length; prompts
from a file are taken as they are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.prompts import Count, Lexicon, Writer
from bench.workload import Ask, Messages


@dataclass(frozen=True, slots=True)
class Manner:
    """How requests are put: `plain` leaves out every field that is not OpenAI's own."""

    endpoint: str  # completions, chat
    model: str
    as_ids: bool
    plain: bool
    ignore_eos: bool
    extra: dict[str, Any]


class PromptFileError(Exception):
    """A line of a file of prompts is none; the message says which."""


async def make_bodies(
    asks: Sequence[Ask], manner: Manner, seed: int, lexicon: Lexicon | None, count: Count | None
) -> list[bytes]:
    writer = Writer(seed, lexicon) if lexicon is not None else None

    async def one(ask: Ask) -> bytes:
        prompt: str | list[int] | Messages
        if not isinstance(ask.prompt, tuple):
            prompt = ask.prompt
        elif manner.as_ids:
            assert writer is not None
            prompt = writer.ids(ask.prompt)
        else:
            assert writer is not None and count is not None
            prompt = await writer.text(ask.prompt, count, leading_space=manner.endpoint == "completions")
        return body(ask, prompt, manner)

    made: list[bytes] = []
    for first in range(0, len(asks), 64):
        made += await asyncio.gather(*map(one, asks[first : first + 64]))
    return made


def body(ask: Ask, prompt: str | list[int] | Messages, manner: Manner) -> bytes:
    fields: dict[str, Any] = {"model": manner.model, "stream": True, "temperature": 0}
    if manner.endpoint == "chat":
        fields["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    else:
        fields["prompt"] = prompt
    limit = "max_completion_tokens" if manner.plain and manner.endpoint == "chat" else "max_tokens"
    fields[limit] = ask.max_tokens
    fields["stream_options"] = {"include_usage": True}
    if not manner.plain:
        fields["stream_options"]["continuous_usage_stats"] = True
        if manner.ignore_eos:
            fields |= {"ignore_eos": True, "min_tokens": ask.max_tokens}
    return msgspec.json.encode(fields | manner.extra)


def read_prompts(lines: Sequence[str], endpoint: str, default_tokens: int) -> list[Ask]:
    """JSON lines: `prompt` (or `text`, or `messages` for chat), and `max_tokens` or `output_length` if it differs."""
    asks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row.get("messages") or row.get("prompt") or row.get("text")
            tokens = int(row.get("max_tokens") or row.get("output_length") or default_tokens)
        except (ValueError, AttributeError, TypeError) as error:
            raise PromptFileError(f"line {number} is no JSON object with a prompt: {error}") from error
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and endpoint == "chat"):
            need = "prompt or messages" if endpoint == "chat" else "prompt"
            raise PromptFileError(f"line {number} has no {need}")
        if tokens < 1:
            raise PromptFileError(f"line {number} asks for {tokens} tokens; at least 1")
        asks.append(Ask(prompt, tokens))
    if not asks:
        raise PromptFileError("there is no prompt in it")
    return asks
