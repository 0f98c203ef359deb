"""One request to an OpenAI-compatible server, its answer stamped as it is read.

In: the bytes of a body. Out: an `Exchange`: the streamed answer and how it ended. Nothing is raised: every failure is a
kind and a reason. The stamp of an event is taken once per read from the socket, before anything is decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.answer import StreamedAnswer
from bench.sse import EventReader

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_SHOWN = 300  # characters of a server's error


@dataclass(slots=True)
class Exchange:
    sent: float = 0.0
    ended: float = 0.0
    answer: StreamedAnswer = field(default_factory=StreamedAnswer)
    error: str = ""
    reason: str = ""


class Client:
    """Connections to one server. `clock` gives seconds; open it as an async context."""

    def __init__(self, url: str, endpoint: str, key: str, timeout: float, clock: Callable[[], float]) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._path = PATHS[endpoint]
        self._clock = clock
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # No limit of connections: a request that waits for one here would look like a slow server.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, body: bytes) -> Exchange:
        exchange = Exchange(sent=self._clock())
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(body, exchange)
        except TimeoutError:
            exchange.error, exchange.reason = "timeout", f"no whole answer within {self._timeout:g} s"
        except aiohttp.ClientConnectorError as error:
            exchange.error, exchange.reason = "connect", str(error)
        except (aiohttp.ClientError, OSError) as error:
            exchange.error, exchange.reason = "broken", f"{type(error).__name__}: {error}"
        except ValueError as error:
            exchange.error, exchange.reason = "bad_answer", str(error)
        exchange.ended = self._clock()
        return exchange

    async def ask_json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, body) of a question about the server; the body is None if it is not JSON."""
        assert self._session is not None
        deadline = aiohttp.ClientTimeout(total=self._timeout)
        async with self._session.request(method, self.url + path, json=body, timeout=deadline) as response:
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                return response.status, None

    async def _exchange(self, body: bytes, exchange: Exchange) -> None:
        assert self._session is not None
        answer, reader = exchange.answer, EventReader()
        async with self._session.post(self.url + self._path, data=body) as response:
            if response.status != 200:
                exchange.error = f"http_{response.status}"
                exchange.reason = (await response.text())[:_SHOWN]
                return
            while piece := await response.content.readany():
                at = self._clock()
                for data in reader.feed(piece):
                    answer.push(data, at)
        if answer.error:
            exchange.error, exchange.reason = "server_error", answer.error[:_SHOWN]
        elif not (answer.done or answer.finish_reason):
            exchange.error, exchange.reason = "broken", "the stream ended without a finish reason and without [DONE]"
        elif not answer.chunks:
            exchange.error, exchange.reason = "no_tokens", "the answer is whole and has no token"
