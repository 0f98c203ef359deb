"""Who may ask: API keys, and how much each of them may ask for.

In: the file of keys (`gateway.key_file`), read again on SIGHUP; requests with `Authorization: Bearer KEY`. Out:
requests that may go on, or a 401 or 429 in OpenAI's shape. Invariants: keys are kept as digests and compared in
constant time; none is ever logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.errors import ApiError
from gateway.http_shell import error_response
from gateway.key_file import KeysError, read_keys
from gateway.key_limits import KeyLimits, KeyUse

log = logging.getLogger("paceline.gateway")

# A probe has no key, and Prometheus seldom one; neither path runs anything or tells what is asked.
FREE = ("/health", "/metrics")


class KeyRing:
    """The keys that are good now, and what each is doing."""

    def __init__(self, path: Path, limits: KeyLimits, refused: Callable[[str], None] = lambda why: None) -> None:
        """`refused` is told of each request that is turned away. Raises `KeysError`."""
        self._path, self._limits, self._refused = path, limits, refused
        self._uses = self._read({})

    def reload(self) -> None:
        """A file that cannot be used changes nothing."""
        try:
            self._uses = self._read(self._uses)
            log.info("read %d API keys from %s", len(self._uses), self._path)
        except KeysError as error:
            log.error("the API keys stay as they are: %s", error)

    def use_of(self, authorization: str) -> KeyUse | None:
        scheme, _, secret = authorization.partition(" ")
        digest = _digest(secret.strip())
        found = None
        for known, use in self._uses.items():  # all of them, whichever it is
            if hmac.compare_digest(known, digest):
                found = use
        return found if scheme.lower() == "bearer" else None

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in FREE:
            return await handler(request)
        authorization = request.headers.get("Authorization", "")
        use = self.use_of(authorization)
        if use is None:
            self._refused("unknown_key")
            message = "no such API key; send one of the gateway's as `Authorization: Bearer KEY`"
            if not authorization.strip():
                message = "no API key given: send one of the gateway's as `Authorization: Bearer KEY`"
            response = error_response(ApiError(401, message, code="invalid_api_key"))
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        wait = use.begin(asyncio.get_running_loop().time(), self._limits)
        if wait is not None:
            self._refused("key_limit")
            message = "this API key asks for more than it may; try again later"
            response = error_response(ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded"))
            response.headers["Retry-After"] = str(max(1, math.ceil(wait)))
            return response
        try:
            return await handler(request)
        finally:
            use.end()

    def _read(self, before: dict[bytes, KeyUse]) -> dict[bytes, KeyUse]:
        digests = [_digest(key.secret) for key in read_keys(self._path)]
        return {digest: before.get(digest) or KeyUse() for digest in digests}


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
