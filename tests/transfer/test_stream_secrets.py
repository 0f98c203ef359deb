"""`stream` over TCP where the cluster has secrets: both ends prove that they know them before anything else counts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import pytest

from tests.transfer.stream_rig import wait
from transfer.io.stream.engine import StreamEngine
from transfer.io.stream.wire import (
    CHALLENGE,
    CHALLENGED,
    HELLO,
    MAGIC,
    VERSION,
    WELCOME,
    WELCOMED,
    decode_endpoint,
    encode_endpoint,
)

HOST, MIB = "127.0.0.1", 1 << 20
OURS, THEIRS = b"o" * 32, b"t" * 32


@contextmanager
def engine(key: bytes | None, fill: int) -> Iterator[tuple[StreamEngine, numpy.ndarray]]:
    data = numpy.full(MIB, fill, dtype=numpy.uint8)
    made = StreamEngine(HOST, 5.0, shared_memory=False, key=key)
    made.register(int(data.ctypes.data), MIB)
    try:
        yield made, data
    finally:
        assert made.close()


@pytest.mark.parametrize(
    ("sender", "target", "refusal"),
    [(OURS, OURS, None), (None, None, None), (THEIRS, OURS, "the peer has other secrets"),
     (None, OURS, "the peer asks for the cluster's secrets"), (OURS, None, "does not ask for the cluster's secrets")],
)  # fmt: skip
def test_kv_goes_between_members_alone(sender: bytes | None, target: bytes | None, refusal: str | None) -> None:
    with engine(sender, 7) as (a, source), engine(target, 0) as (b, pool):
        b.grant("x", [(int(pool.ctypes.data), MIB)])
        a.connect("b", b.endpoint())
        a.submit(1, "b", [(int(source.ctypes.data), int(pool.ctypes.data), MIB)], "x")
        (ended,) = wait(a)
        assert (ended.error is None) == (refusal is None) and (refusal or "") in (ended.error or "")
        assert (pool == (7 if refusal is None else 0)).all()


def test_a_proof_is_good_for_one_connection() -> None:
    """What somebody overheard opens nothing: each connection has a nonce of its own."""
    with engine(OURS, 0) as (b, _):
        parsed = decode_endpoint(b.endpoint())
        challenges = []
        for proof in (b"\0" * 32, b"\0" * 32):
            with socket.create_connection((HOST, parsed.port), 5.0) as stranger:
                hello = HELLO.pack(MAGIC, VERSION, bytes.fromhex(parsed.incarnation), bytes(16))
                stranger.sendall(hello)
                challenge = stranger.recv(WELCOME.size + CHALLENGE.size, socket.MSG_WAITALL)
                assert WELCOME.unpack_from(challenge) == (MAGIC, VERSION, CHALLENGED)
                challenges.append(challenge)
                stranger.sendall(proof)
                assert stranger.recv(1) == b""
        assert challenges[0] != challenges[1]
        assert b.receiver_counters.strangers == 2 and b.receiver_counters.frames == 0


@pytest.mark.parametrize("answer", [WELCOME.pack(MAGIC, VERSION, WELCOMED), WELCOME.pack(MAGIC, VERSION, CHALLENGED) + b"\0" * 48])  # fmt: skip
def test_an_impostor_gets_no_kv(answer: bytes) -> None:
    with socket.create_server((HOST, 0)) as impostor, engine(OURS, 7) as (a, source), engine(OURS, 0) as (b, _):
        parsed = decode_endpoint(b.endpoint())
        parsed = type(parsed)(HOST, impostor.getsockname()[1], parsed.incarnation, parsed.boot, parsed.memory)
        a.connect("b", encode_endpoint(parsed))
        connection, _ = impostor.accept()
        with connection:
            a.submit(1, "b", [(int(source.ctypes.data), 0, MIB)], "x")
            assert len(connection.recv(HELLO.size, socket.MSG_WAITALL)) == HELLO.size
            connection.sendall(answer)
            (ended,) = wait(a)
            assert ended.error and ended.quiet
            try:
                assert connection.recv(1) == b"", "not a byte more"
            except ConnectionResetError:
                pass
