"""The one place where the group's gRPC connections and ports are made."""

from __future__ import annotations

from typing import Any

import grpc

from pipeline.io.address import BadAddress

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment is not for these addresses
    ("grpc.max_receive_message_length", 4 << 20),
)


def dial_leader(address: str) -> Any:
    """A fresh channel, which resolves the leader's name anew: its pod may have another address by now."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def bind(server: Any, listen: str) -> int:
    """The port. Raises `BadAddress` if it cannot be bound."""
    try:
        port = int(server.add_insecure_port(listen))
    except RuntimeError as error:
        raise BadAddress(f"cannot listen on {listen}: {error}") from None
    if not port:
        raise BadAddress(f"cannot listen on {listen}: the port is in use, or the address is not one of this host")
    return port
