"""What every HTTP answer of the gateway has in common.

In: handlers' results and exceptions. Out: responses in OpenAI's error shape, each with an
X-Request-Id, the mode, and the pair that served it once one was chosen.
"""

from __future__ import annotations

import logging
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.errors import ApiError
from gateway.instances import Pair
from gateway.openai_replies import encode
from gateway.request_watch import RequestWatch
from gateway.service import Gateway

log = logging.getLogger("paceline.gateway")

GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
STREAMING: web.RequestKey[bool] = web.RequestKey("streaming", bool)  # an answer has begun
WATCH: web.RequestKey[RequestWatch] = web.RequestKey("watch", RequestWatch)
PAIR: web.RequestKey[Pair] = web.RequestKey("pair", Pair)

JSON_HEADERS = {"Content-Type": "application/json"}
_LONGEST_CLIENT_ID = 256


def error_response(error: ApiError) -> web.Response:
    headers = dict(JSON_HEADERS)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return web.Response(status=error.status, body=encode(error.body()), headers=headers)


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[REQUEST_ID] = uuid.uuid4().hex
    try:
        return await handler(request)
    except ApiError as error:
        _cut_stream(request)
        if error.status >= 500:
            log.warning("%s %s: %d %s", request[REQUEST_ID], request.path, error.status, error.message)
        return error_response(error)
    except web.HTTPException as error:  # aiohttp's own: no such route, wrong method, body too large
        return _http_error(request, error)
    except web.RequestPayloadError as error:  # a body that is not what its Content-Encoding says, or cut short
        request.content.feed_eof()  # or aiohttp, which tries to read the rest, drops the connection with our answer
        response = error_response(ApiError(400, f"the body cannot be read: {error}", code="unreadable_body"))
        response.force_close()
        return response
    except ConnectionError:
        raise  # the client has gone; there is nobody to answer
    except Exception:
        log.exception("%s %s failed", request[REQUEST_ID], request.path)
        _cut_stream(request)
        return error_response(ApiError(500, "the gateway failed", type="server_error", code="internal_error"))


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    message = f"{error.reason}: {request.method} {request.path}"
    code = str(error.status)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.app[GATEWAY].config.max_body_bytes
        message, code = f"the body is larger than {limit} bytes, the limit of this gateway", "request_too_large"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        message, code = f"{request.path} does not take {request.method}", "method_not_allowed"
    elif isinstance(error, web.HTTPNotFound):
        message, code = f"there is no {request.path} here; docs/api.md lists what there is", "not_found"
    response = error_response(ApiError(error.status, message, code=code))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _cut_stream(request: web.Request) -> None:
    """A stream that cannot end with an error event (its client does not read) ends with its connection."""
    if request.get(STREAMING) and request.transport is not None:
        request.transport.abort()


async def add_headers(http: web.Request, response: web.StreamResponse) -> None:
    """Signal on_response_prepare: also for streams and errors."""
    ours = http.get(REQUEST_ID) or uuid.uuid4().hex
    theirs = http.headers.get("X-Request-Id", "")
    usable = 0 < len(theirs) <= _LONGEST_CLIENT_ID and theirs.isprintable()
    response.headers["X-Request-Id"] = theirs if usable else ours
    response.headers["X-Paceline-Mode"] = "disaggregated"
    watch = http.get(WATCH)
    if watch is not None and watch.breakdown.told:
        response.headers["Server-Timing"] = watch.breakdown.server_timing()
    pair = http.get(PAIR)
    if pair is not None:
        response.headers["X-Paceline-Prefill"] = pair.prefill.instance_id
        response.headers["X-Paceline-Decode"] = pair.decode.instance_id
