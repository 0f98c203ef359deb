"""Strangers at the ports of a running cluster.

In: a port, or the addresses that it speaks ZMQ and gRPC at; how many frames. Out: frames sent. Nothing here expects an
answer: what counts is how the cluster is afterwards.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Sequence

import grpc
import zmq

from security.channels import dial_blocking
from security.gatekeeper import present
from security.secrets import Secrets
from tests.e2e.strangers import garbage
from tests.e2e.strangers.ports import Port

SLOW = 24  # connections that are kept open and get a byte now and then


def knock(port: Port, count: int, seed: int) -> int:
    """Raw connections, one message each; some stay, some are reset, most go."""
    chance = random.Random(f"{seed} {port.process}")
    slow: list[socket.socket] = []
    for number in range(count):
        data = _for(port, chance)(chance)
        family = socket.AF_UNIX if isinstance(port.address, str) else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(2.0)
        with contextlib.suppress(OSError):  # turned away, or ended while we spoke: that is its right
            connection.connect(port.address)
            connection.sendall(data[: len(data) // 2] if number % 7 == 0 else data)
        if number % 7 == 0 and len(slow) < SLOW:
            slow.append(connection)
        else:
            if number % 5 == 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        if slow and number % 3 == 0:
            with contextlib.suppress(OSError):
                chance.choice(slow).send(chance.randbytes(1))
    for connection in slow:
        connection.close()
    return count


def speak_link(addresses: Sequence[str], count: int, seed: int, stranger: Secrets | None) -> int:
    """Frames to peer links, in ZeroMQ's own manner; with `stranger`'s keys, which are not the cluster's."""
    chance = random.Random(seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sent = 0
    try:
        while sent < count:
            socket_ = context.socket(zmq.DEALER)
            socket_.setsockopt(zmq.LINGER, 200)
            socket_.setsockopt(zmq.SNDTIMEO, 500)
            if stranger is not None:
                present(socket_, stranger.curve_public, stranger.curve_secret, stranger.curve_public)
            socket_.connect(chance.choice(addresses))
            for _ in range(min(500, count - sent)):
                parts = [garbage.link_frame(chance) for _ in range(chance.choice([1, 1, 1, 1, 3]))]
                with contextlib.suppress(zmq.Again):
                    socket_.send_multipart(parts)
                sent += 1
            socket_.close()
    finally:
        context.destroy(200)
    return sent


def call(addresses: Sequence[str], count: int, seed: int, secrets: Secrets | None) -> int:
    """Calls of every method with damaged messages, of a member if there are secrets."""
    chance = random.Random(seed)
    channels = [dial_blocking(address, secrets) for address in addresses]
    try:
        for _ in range(count):
            method, good = chance.choice(list(garbage.GRPC.items()))
            data = chance.choice([garbage.damaged(chance, good.SerializeToString()), garbage.noise(chance)])
            channel = chance.choice(channels)
            with contextlib.suppress(grpc.RpcError):
                if method.endswith("/Generate"):
                    list(channel.unary_stream(method)(data, timeout=5.0))
                else:
                    channel.unary_unary(method)(data, timeout=5.0)
    finally:
        for channel in channels:
            channel.close()
    return count


def _for(port: Port, chance: random.Random) -> garbage.Make:
    if isinstance(port.address, str):
        return garbage.local
    if " rank " in port.process:
        return chance.choice([garbage.zmtp, garbage.stream])
    return garbage.http if port.process == "gateway" and chance.randrange(5) else garbage.http2
