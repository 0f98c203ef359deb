"""What a client may cost the gateway before it has asked for anything.

In: connections and bodies as they come. Out: those within bounds. Headers are bounded by aiohttp (8 KiB a line, 128
fields) and by the time that a connection may idle; here are the number of connections and the time of a body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.errors import ApiError

log = logging.getLogger("paceline.gateway")

IDLE_S = 75.0  # without a whole request head; longer than the keep-alive of usual proxies
BODY_S = 60.0
LINGER_S = 2.0  # for the rest of a body whose request has its answer already


class Door:
    """Protocol factory of the listening socket: lets `most` connections in, and closes others at once."""

    def __init__(self, server: web.Server, most: int, refused: Callable[[str], None] = lambda why: None) -> None:
        self._server, self._most, self._refused = server, most, refused
        self._told = False

    def __call__(self) -> asyncio.Protocol:
        if len(self._server.connections) < self._most:
            return self._server()
        self._refused("connections")
        if not self._told:
            self._told = True
            log.warning("more than %d connections; further ones are closed at once", self._most)
        return _TurnedAway()


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()


def body_deadline(seconds: float = BODY_S) -> Middleware:
    @web.middleware
    async def read_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handlers find the body read. One that trickles in ends the request."""
        try:
            async with asyncio.timeout(seconds):
                await request.read()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {seconds:g} s", code="request_timeout") from None
        return await handler(request)

    return read_in_time
