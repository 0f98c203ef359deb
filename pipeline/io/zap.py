"""Who may speak to the ranks of an instance: CURVE keys, and the rank that each key belongs to.

The daemon makes one key pair per rank and epoch and tells each rank its own secret and everyone's public
keys. Every ring socket is encrypted with them, and so are hidden states and the control channel where they
leave the host. The gatekeeper of a context (`security.gatekeeper`) names the rank whose key a message came with:
a reporter's rank is bound to its key and never read from what it says.
"""

from __future__ import annotations

import msgspec
import zmq

from security.gatekeeper import guard, present

_TCP_IDLE_S = 30  # after which a quiet connection is probed, so that no middlebox forgets it


def crosses_hosts(endpoint: str) -> bool:
    """Whether others than this host's own users can reach the endpoint."""
    return endpoint.startswith("tcp://")


def lock(socket: zmq.Socket[bytes], secret: str) -> None:
    """Before `bind`: only peers that the context's gatekeeper knows are heard."""
    _prepare_for_tcp(socket)
    guard(socket, secret)


def _prepare_for_tcp(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _TCP_IDLE_S)


class RingKeys(msgspec.Struct, frozen=True):
    """Z85 keys: this rank's own pair, and the public ones of all ranks in rank order."""

    public: str
    secret: str
    ranks: tuple[str, ...]

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before `bind`."""
        lock(socket, self.secret)

    def dial(self, socket: zmq.Socket[bytes], rank: int) -> None:
        """Before `connect`; `rank` is the one that binds."""
        self.dial_key(socket, self.ranks[rank])

    def dial_key(self, socket: zmq.Socket[bytes], server: str) -> None:
        """Before `connect`; `server` is the public key of the end that binds."""
        _prepare_for_tcp(socket)
        present(socket, self.public, self.secret, server)


def make_keys(ranks: int) -> list[RingKeys]:
    """Fresh keys for an epoch, one `RingKeys` per rank."""
    pairs = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(ranks)]
    return [RingKeys(public, secret, tuple(public for public, _ in pairs)) for public, secret in pairs]
