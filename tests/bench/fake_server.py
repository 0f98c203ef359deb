"""A server that speaks OpenAI's API and answers one request at a time, after a pause: a real socket, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class FakeServer:
    def __init__(self, pause: float = 0.0, usage: bool = True) -> None:
        self.pause, self.usage = pause, usage
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.failures: dict[int, str] = {}  # number of a request → how it fails
        self.url, self.key = "", ""
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeServer]:
        application = web.Application(client_max_size=1 << 26)
        application.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
                web.post("/tokenize", self._tokenize),
            ]
        )
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, http: web.Request) -> web.Response:
        if self.key and http.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no API key given"}}, status=401)
        return web.json_response({"data": [{"id": "fake"}]})

    async def _tokenize(self, http: web.Request) -> web.Response:
        words = (await http.json())["prompt"].split()
        return web.json_response({"count": len(words)})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        number, body = len(self.bodies), await http.json()
        self.bodies.append(body)
        self.headers.append(dict(http.headers))
        failure = self.failures.get(number)
        if failure == "refuse":
            return web.json_response({"error": {"message": "no room"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self._turn:
            await asyncio.sleep(self.pause)
            await response.prepare(http)
            wanted = body.get("max_tokens") or body["max_completion_tokens"]
            for token in range(1, wanted + 1):
                await response.write(self._event(body, token, "length" if token == wanted else None))
                if failure == "break":
                    assert http.transport is not None
                    http.transport.abort()
                    return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, body: dict[str, Any], token: int, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
        event: dict[str, Any] = {"choices": [choice]}
        if self.usage:
            prompt = body.get("prompt")
            event["usage"] = {"prompt_tokens": len(prompt or ()), "completion_tokens": token}
        return b"data: " + json.dumps(event).encode() + b"\n\n"
