"""gRPC between the processes of a cluster: mutual TLS where there are secrets, plain where there are none.

In: an address and the cluster's secrets, or None. Out: a channel, or a bound port. Invariant: with secrets, each
side proves to the other that it holds the cluster's certificate, whatever its address is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio

from security.secrets import CLUSTER_NAME, Secrets

Options = Iterable[tuple[str, Any]]


def dial(address: str, secrets: Secrets | None, options: Options = ()) -> grpc.aio.Channel:
    """A channel of asyncio."""
    if secrets is None:
        return grpc.aio.insecure_channel(address, options=list(options))
    return grpc.aio.secure_channel(address, _credentials(secrets), options=[*options, *_BY_CLUSTER_NAME])


def dial_blocking(address: str, secrets: Secrets | None, options: Options = ()) -> grpc.Channel:
    """A channel whose calls wait on gRPC's own threads."""
    if secrets is None:
        return grpc.insecure_channel(address, options=list(options))
    return grpc.secure_channel(address, _credentials(secrets), options=[*options, *_BY_CLUSTER_NAME])


def bind(server: Any, address: str, secrets: Secrets | None) -> int:
    """Lets a server, of asyncio or not, listen; the port. Raises `RuntimeError`, or gives 0, as gRPC does."""
    if secrets is None:
        return int(server.add_insecure_port(address))
    credentials = grpc.ssl_server_credentials(
        [(secrets.key, secrets.certificate)], root_certificates=secrets.authority, require_client_auth=True
    )
    return int(server.add_secure_port(address, credentials))


# Addresses of pods change; what a member is called does not.
_BY_CLUSTER_NAME = (("grpc.ssl_target_name_override", CLUSTER_NAME),)


def _credentials(secrets: Secrets) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(secrets.authority, secrets.key, secrets.certificate)
