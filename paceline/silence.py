"""Why a part that was asked over gRPC gave no answer, for people.

In: how the call failed, and the address. Out: one line with what to do. Every command says it by this function.
"""

from __future__ import annotations

import grpc

_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


def is_silent(code: grpc.StatusCode) -> bool:
    """Nobody answered; with any other code somebody did."""
    return code in _SILENT


def why_silent(error: grpc.RpcError, address: str) -> str:
    code, details = error.code(), str(error.details())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer"
    if code is not grpc.StatusCode.UNAVAILABLE:
        return f"{code.name}: {details}"
    if "http1" in details:
        return f"no answer: HTTP is spoken there, not gRPC; a gateway is asked by http://{address}/health"
    if "refused" in details:
        return "no answer"
    if "resolving" in details:
        return f"no answer: {details}"
    # A server ends a connection without a word when one side has secrets and the other none, or others.
    return "no answer; do both sides have the same --secrets?"
