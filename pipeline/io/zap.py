"""Who may speak to the ranks of an instance: CURVE keys, and the rank that each key belongs to.

The daemon makes one key pair per rank and epoch and tells each rank its own secret and everyone's public
keys. Every ring socket is encrypted with them, and so are hidden states and the control channel where they
leave the host. ZeroMQ asks the `Gatekeeper` about each connection (ZAP, RFC 27 of ZeroMQ), and what it answers,
the rank, comes with every message: a reporter's rank is bound to its key and never read from what it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import zmq
from zmq.utils import z85

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"paceline"
_TCP_IDLE_S = 30  # after which a quiet connection is probed, so that no middlebox forgets it


def crosses_hosts(endpoint: str) -> bool:
    """Whether others than this host's own users can reach the endpoint."""
    return endpoint.startswith("tcp://")


def lock(socket: zmq.Socket[bytes], secret: str) -> None:
    """Before `bind`: only peers that the context's `Gatekeeper` knows are heard."""
    _prepare_for_tcp(socket)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())


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
        socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())


def make_keys(ranks: int) -> list[RingKeys]:
    """Fresh keys for an epoch, one `RingKeys` per rank."""
    pairs = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(ranks)]
    return [RingKeys(public, secret, tuple(public for public, _ in pairs)) for public, secret in pairs]


class Gatekeeper:
    """Answers authentication requests of one context; the control loop polls `socket`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ranks: Sequence[str]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)
        self.refused = 0
        self._ranks = {z85.decode(key): rank for rank, key in enumerate(ranks)}

    def answer(self) -> None:
        while True:
            try:
                _, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = self._ranks.get(credentials[0]) if mechanism == b"CURVE" and credentials else None
            if rank is None:
                self.refused += 1
                self.socket.send_multipart([b"1.0", request, b"400", b"unknown key", b"", b""])
            else:
                self.socket.send_multipart([b"1.0", request, b"200", b"OK", str(rank).encode(), b""])
