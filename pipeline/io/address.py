"""Which address an instance listens on, and which one it tells others.

In: the configured `listen` ("host:port") and `advertise` (a host, or ""). Out: the two hosts, or
`BadAddress` with the reason. Invariant: what is advertised can be reached by whoever can reach the
listening socket; a loopback or unspecified address never travels to another host.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from security.channels import bind
from security.secrets import Secrets

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class BadAddress(ValueError):
    """The configured addresses cannot work; the message says why and what to set."""


def split_host_port(text: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises `BadAddress`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise BadAddress(f"listen address {text!r} is not host:port")
    return host, int(port)


def join_host_port(host: str, port: int) -> str:
    """The inverse of `split_host_port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric_host(host: str) -> str:
    """The address that `host` means here. Raises `BadAddress`."""
    return str(_resolve(host))


def source_towards(host: str) -> str:
    """The address of this host from which packets to `host` would go. Raises `BadAddress`."""
    there = _resolve(host)
    try:
        with socket.socket(socket.AF_INET6 if there.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((str(there), 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BadAddress(f"no way to {host} ({there}) from here: {error}") from None


def advertised_host(listen: str, advertise: str) -> str:
    """The host that peers and gateways are told. Raises `BadAddress`."""
    host, _ = split_host_port(listen)
    listening = _resolve(host)
    if not advertise:
        if listening.is_unspecified:
            raise BadAddress(
                f"listening on {listen} (every address) needs an explicit advertise host (--advertise): "
                "the address at which other hosts reach this one"
            )
        return host
    told = _resolve(advertise)
    if told.is_unspecified or told.is_multicast:
        raise BadAddress(f"advertise host {advertise} ({told}) is not the address of a host")
    if told.is_loopback and not listening.is_loopback:
        raise BadAddress(
            f"advertise host {advertise} is the loopback address {told}, but the instance listens on {listen} for "
            "other hosts; they would reach themselves. Advertise this host's own address, or listen on 127.0.0.1"
        )
    if listening.is_loopback and not told.is_loopback:
        raise BadAddress(f"advertise host {advertise} ({told}) cannot be reached while listening only on {listen}")
    return advertise


def _resolve(host: str) -> Address:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the second: it cannot be a name at all
        raise BadAddress(f"host {host!r} does not resolve here: {error}") from None
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def bind_or_say(server: Any, listen: str, secrets: Secrets | None) -> int:
    """Lets a gRPC server listen; the port. Raises `BadAddress` if it cannot."""
    try:
        port, why = bind(server, listen, secrets), ""
    except RuntimeError as error:
        port, why = 0, f": {error}"
    if not port:
        raise BadAddress(f"cannot listen on {listen}: the port is in use, or the address is not one of this host{why}")
    return port
