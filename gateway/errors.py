"""Errors a client sees, in OpenAI's shape.

In: what went wrong, in the gateway's words. Out: `ApiError`, which knows its HTTP status and its
JSON body. Pure. Every failure of a request ends in exactly one `ApiError`, sent as an HTTP
response before the first byte of the answer and as an SSE event after it.
"""

from __future__ import annotations

import math
from typing import Any

RETRY_AFTER_S, LONGEST_RETRY_AFTER_S = 1, 600


class ApiError(Exception):
    """One error for one client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self._retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def retry_after_s(self) -> int | None:
        """Set where asking again later may help."""
        return self._retry_after_s if self.status in (429, 503) else None


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str) -> ApiError:
    return ApiError(404, f"The model '{name}' does not exist", param="model", code="model_not_found")


def too_busy(limit: int) -> ApiError:
    message = f"the gateway already runs {limit} requests, its limit; try again shortly"
    return ApiError(429, message, type="rate_limit_error", code="too_many_requests")


def too_late(message: str, late_s: float) -> ApiError:
    """It would be answered after its client has stopped waiting. So much later the queue may be short enough."""
    wait = math.ceil(min(max(late_s, RETRY_AFTER_S), LONGEST_RETRY_AFTER_S))
    return ApiError(429, message, type="rate_limit_error", code="too_late", retry_after_s=wait)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, type="service_unavailable_error", code="no_instance")


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, type="timeout_error", code="timeout")


# gRPC status name → (HTTP status, OpenAI type, code). Everything else is a 500.
_BY_STATUS = {
    "INVALID_ARGUMENT": (400, "invalid_request_error", "invalid_request"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error", "instance_busy"),
    "UNAVAILABLE": (503, "service_unavailable_error", "instance_unavailable"),
    "FAILED_PRECONDITION": (503, "service_unavailable_error", "instance_unavailable"),
    "CANCELLED": (503, "service_unavailable_error", "instance_unavailable"),  # an instance that stops says this
    "DEADLINE_EXCEEDED": (504, "timeout_error", "timeout"),
}


def request_failed(status: str, message: str) -> ApiError:
    """The error of a request that an instance failed, by the gRPC status name that describes it best."""
    http_status, kind, code = _BY_STATUS.get(status, (500, "server_error", "instance_error"))
    return ApiError(http_status, message, type=kind, code=code)
