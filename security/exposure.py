"""May this process listen there? On loopback always; elsewhere only protected, or where its operator insists.

In: hosts, and whether there is protection. Out: nothing, or `Exposed` that says what to do.
"""

from __future__ import annotations

import ipaddress
import socket


class Exposed(ValueError):
    """Whoever reaches the port could do everything; the message says how to change that."""


def is_loopback(host: str) -> bool:
    """Nobody outside this host can reach it. A name counts by all addresses that it has; unknown ones do not count."""
    host = host.removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the second: it cannot be a name at all
        return False
    return bool(found) and all(ipaddress.ip_address(str(a[4][0]).partition("%")[0]).is_loopback for a in found)


def check_cluster_port(what: str, host: str, secrets: bool, insecure: bool) -> None:
    """For ports that other processes of the cluster reach. Raises `Exposed`."""
    if not (secrets or insecure or is_loopback(host)):
        raise Exposed(
            f"{what} would listen on {host} for other hosts without protection: whoever reaches it could run "
            "requests, read prompts and write KV. Make secrets with `paceline certs DIR` and give every process "
            "--secrets DIR (or PACELINE_SECRETS), or say --insecure if only trusted hosts can reach it"
        )


def check_public_port(what: str, host: str, keys: bool, insecure: bool) -> None:
    """For the port that clients reach. Raises `Exposed`."""
    if not (keys or insecure or is_loopback(host)):
        raise Exposed(
            f"{what} would listen on {host} for everyone. Write a file with one API key per line and give it with "
            "--api-keys FILE, or say --insecure if something in front of it checks who may ask"
        )
