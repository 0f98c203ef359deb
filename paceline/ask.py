"""Asks a running gateway one question and prints the answer as it comes.

In: URL, model name, question. Out: text on a stream and, at the end, one line with counts and times.
"""

from __future__ import annotations

import json
import shlex
import time
from typing import Any, TextIO

import aiohttp


class AskError(Exception):
    """The gateway gave no answer; the message says why."""


def chat_request(model: str, question: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,  # the same answer every time
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def curl_command(url: str, model: str, keyed: bool = False) -> str:
    """A line to paste into a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me a short story."}], "stream": True}
    key = ' -H "Authorization: Bearer $API_KEY"' if keyed else ""
    data = shlex.quote(json.dumps(body))
    return f"curl -sN {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {data}"


async def fitting(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> dict[str, Any]:
    """The request with no more `max_tokens` than the context leaves; as it is if that cannot be found out."""
    question = {"model": request["model"], "messages": request["messages"], "add_generation_prompt": True}
    async with session.post(f"{url}/tokenize", json=question) as response:
        if response.status != 200:
            return request
        told = await response.json()
    room = told["max_model_len"] - told["count"]
    # Without any room the gateway's own refusal is the best message.
    return request | {"max_tokens": min(request["max_tokens"], room)} if room > 0 else request


async def ask(
    url: str, model: str, question: str, out: TextIO, *, max_tokens: int = 128, timeout: float = 300, key: str = ""
) -> None:
    """Streams the answer to `out`. Raises `AskError`."""
    began = time.monotonic()
    first = 0.0
    usage: dict[str, Any] = {}
    finish = ""
    try:
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=timeout),
                headers={"Authorization": f"Bearer {key}"} if key else None,
            ) as session,
            session.post(
                f"{url}/v1/chat/completions",
                json=await fitting(session, url, chat_request(model, question, max_tokens)),
            ) as response,
        ):
            if response.status != 200:
                raise AskError(f"the gateway answered {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                event = parse_event(line)
                if event is None:
                    continue
                if "error" in event:
                    raise AskError(str(event["error"].get("message", event["error"])))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    text = (choice.get("delta") or {}).get("content") or ""
                    if text and not first:
                        first = time.monotonic() - began
                    out.write(text)
                    out.flush()
                    finish = choice.get("finish_reason") or finish
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise AskError(f"no answer from {url}: {error or type(error).__name__}") from error
    if not finish:
        raise AskError("the answer broke off")
    took = time.monotonic() - began
    tokens = usage.get("completion_tokens", "?")
    out.write(f"\n({tokens} tokens in {took:.1f} s, the first after {first:.2f} s; ended by {finish})\n")
    out.flush()


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The JSON of one server-sent line; None for anything else."""
    text = line.decode(errors="replace").strip()
    if not text.startswith("data:") or text == "data: [DONE]":
        return None
    event = json.loads(text.removeprefix("data:"))
    return event if isinstance(event, dict) else None
