"""What a run learns of its server before it begins: the model's name, and how the server counts tokens.

In: an open `Client`. Out: names and counts. Raises `ServerError` with what to do about it.
"""

from __future__ import annotations

import asyncio

import aiohttp

from bench.client import Client


class ServerError(Exception):
    """The server cannot be measured; the message says why."""


async def model_of(client: Client) -> str:
    """The first model that the server lists."""
    try:
        status, body = await client.ask_json("GET", "/v1/models")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ServerError(f"no answer from {client.url}: {error or type(error).__name__}") from error
    if status == 401:
        raise ServerError(f"{client.url} answered 401: it asks for a key; give --api-key or set $PACELINE_API_KEY")
    try:
        return str(body["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{client.url}/v1/models answered {status} and names no model; give --model") from None


class ServerCount:
    """Tokens of a text by the server's /tokenize, special tokens left out."""

    def __init__(self, client: Client, model: str) -> None:
        self._client, self._model = client, model
        self._room = asyncio.Semaphore(8)

    async def __call__(self, text: str) -> int:
        question = {"model": self._model, "prompt": text, "add_special_tokens": False}
        async with self._room:
            try:
                status, body = await self._client.ask_json("POST", "/tokenize", question)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise ServerError(f"no answer from {self._client.url}/tokenize: {error}") from error
        if status != 200 or not isinstance(body, dict) or not isinstance(body.get("count"), int):
            raise ServerError(
                f"{self._client.url}/tokenize answered {status}: this server does not count tokens; give a folder"
                " with its tokenizer.json (--tokenizer), or prompts as token ids (--prompt-as ids)"
            )
        count: int = body["count"]
        return count
