"""How a member dials its leader."""

from __future__ import annotations

import grpc.aio

from security.channels import dial
from security.secrets import Secrets

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment is not for these addresses
    ("grpc.max_receive_message_length", 4 << 20),
)


def dial_leader(address: str, secrets: Secrets | None) -> grpc.aio.Channel:
    """A fresh channel, which resolves the leader's name anew: its pod may have another address by now."""
    return dial(address, secrets, _OPTIONS)
