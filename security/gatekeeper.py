"""Answers ZeroMQ's question who may connect: holders of known CURVE keys, and nobody else.

In: authentication requests (ZAP, RFC 27 of ZeroMQ) of the sockets of one context. Out: yes with the index of the
key, which then comes with every message as its `User-Id`, or no, counted. Whoever owns the context polls `socket`.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.utils import z85

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"paceline"


class Gatekeeper:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], known: Sequence[str | bytes]) -> None:
        """`known`: public keys, Z85."""
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)
        self.refused = 0
        self._known = {z85.decode(key): index for index, key in enumerate(known)}

    def answer(self) -> None:
        while True:
            try:
                _, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            index = self._known.get(credentials[0]) if mechanism == b"CURVE" and credentials else None
            if index is None:
                self.refused += 1
                self.socket.send_multipart([b"1.0", request, b"400", b"unknown key", b"", b""])
            else:
                self.socket.send_multipart([b"1.0", request, b"200", b"OK", str(index).encode(), b""])

    def close(self) -> None:
        self.socket.close(0)


def guard(socket: zmq.Socket[bytes], secret: str | bytes) -> None:
    """Before `bind`: only peers that the context's gatekeeper knows, encrypted."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, _bytes(secret))


def present(socket: zmq.Socket[bytes], public: str | bytes, secret: str | bytes, server: str | bytes) -> None:
    """Before `connect`: our key pair, to the holder of `server` alone."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, _bytes(server))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, _bytes(public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, _bytes(secret))


def _bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key
