"""The `stream` engine and peers that die, restart, lie or say nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket

import msgspec
import numpy
import pytest

from tests.transfer.stream_rig import HOST, MIB, PATHS, Memory, end, other_process, pair, wait
from transfer.io.engine import Completion, EngineError
from transfer.io.stream import tcp as stream_tcp
from transfer.io.stream.engine import StreamEngine
from transfer.io.stream.wire import (
    MAGIC,
    VERSION,
    WELCOME,
    WELCOMED,
    decode_endpoint,
    encode_endpoint,
    verdict,
)


@pytest.mark.parametrize("path", PATHS)
def test_a_receiver_that_is_killed_ends_the_handles(path: str) -> None:
    source = Memory("tcp", 32 * MIB)
    receiver = other_process("receive", path, str(32 * MIB))
    try:
        said = json.loads(receiver.stdout.readline())
        source.engine.connect("b", said["endpoint"].encode())
        writes = [(source.address, said["address"], 32 * MIB)]
        source.engine.submit(0, "b", writes, "x")
        assert wait(source.engine) == [Completion(0)]
        for handle in range(1, 100):
            source.engine.submit(handle, "b", writes, "x")
        receiver.kill()
        ended: list[Completion] = []
        while len(ended) < 99:
            ended += wait(source.engine)
        assert ended[-1].error and ended[-1].quiet
        assert len({one.handle for one in ended}) == 99 and source.engine.handles_outstanding == 0
        source.engine.submit(200, "b", writes, "x")
        assert wait(source.engine)[0].error, "nobody listens there any more"
    finally:
        end(receiver)
        source.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_restarted_engine_at_the_same_port_is_another_one(path: str) -> None:
    source, target = Memory("tcp", MIB, fill=9), Memory(path, MIB)
    target.engine.grant("x", [(target.address, MIB)])
    now = decode_endpoint(target.engine.endpoint())
    before = msgspec.structs.replace(now, incarnation="0" * 32)
    source.engine.connect("b", encode_endpoint(before))
    for handle in (1, 2):
        source.engine.submit(handle, "b", [(source.address, target.address, 10)], "x")
        (ended,) = wait(source.engine)
        assert "restarted" in (ended.error or "") and ended.quiet
    assert target.engine.receiver_counters.strangers == 1, "which is final"
    assert not target.data.any()
    source.engine.connect("b", target.engine.endpoint())
    source.engine.submit(3, "b", [(source.address, target.address, 10)], "x")
    assert wait(source.engine) == [Completion(3)]
    source.close()
    target.close()


@pytest.mark.parametrize("broken", ["no socket", "another host"])
def test_without_shared_memory_it_goes_by_tcp(broken: str) -> None:
    with pair("memory") as both:
        both.b.grant("x", both.areas((0, MIB)))
        endpoint = decode_endpoint(both.b.endpoint())
        if broken == "no socket":
            endpoint = msgspec.structs.replace(endpoint, memory="paceline-stream-nobody")
        else:
            endpoint = msgspec.structs.replace(endpoint, boot="another")
        both.a.connect("b", encode_endpoint(endpoint))
        assert both.send("x", (0, 0, MIB)).error is None
        assert both.b.receiver_counters.bytes_landed == MIB


@pytest.mark.parametrize("lacking", ["locks", "files"])
def test_a_host_that_cannot_fence_shared_memory_offers_none(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EINVAL, "no such thing here")

    with pair("tcp") as both:
        target = Memory("memory", MIB)
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(*((fcntl, "fcntl") if lacking == "locks" else (os, "ftruncate")), refuse)
            endpoint = target.engine.endpoint()
        assert decode_endpoint(endpoint).memory == "" and len(os.listdir("/proc/self/fd")) == before
        both.a.connect("c", endpoint)
        target.engine.grant("x", [(target.address, MIB)])
        both.a.submit(1, "c", [(both.source.address, target.address, MIB)], "x")
        assert wait(both.a) == [Completion(1)] and (target.data == both.source.data[:MIB]).all()
        target.close()


def test_an_unsealed_or_short_file_is_no_shared_memory() -> None:
    engine = StreamEngine(HOST, 20.0)
    data = numpy.zeros(MIB, dtype=numpy.uint8)
    for flags, size in ((0, MIB), (os.MFD_ALLOW_SEALING, MIB - 1)):
        descriptor = os.memfd_create("test", flags | os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        with pytest.raises(EngineError, match="no region"):
            engine.register(int(data.ctypes.data), MIB, descriptor)
        os.close(descriptor)
    assert engine.close()


@pytest.mark.parametrize(
    "endpoint",
    [
        b"",
        b"\xff" * 40,
        b"mooncake/1 127.0.0.1:9",
        b"stream/1 []",
        b'stream/1 ["127.0.0.1",0,"00000000000000000000000000000000","",""]',
        b'stream/1 ["somewhere.example",80,"00000000000000000000000000000000","",""]',
        b'stream/1 ["127.0.0.1",80,"0","",""]',
        b'stream/1 ["127.0.0.1",80,"00000000000000000000000000000000","","/etc/passwd"]',
        b"stream/1 " + b"[" * 2000,
    ],
)
def test_a_malformed_endpoint_fails_its_own_handles(endpoint: bytes) -> None:
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, 10)))
        both.a.connect("c", endpoint)
        both.a.submit(1, "c", both.writes((0, 0, 10)), "x")
        (ended,) = wait(both.a)
        assert "the peer's endpoint is" in (ended.error or "") and ended.quiet
        assert both.send("x", (0, 0, 10)).error is None


@pytest.mark.parametrize("answers", [b"", WELCOME.pack(MAGIC, VERSION, WELCOMED)])
def test_a_peer_that_accepts_and_never_answers_meets_the_deadline(answers: bytes) -> None:
    with socket.create_server((HOST, 0)) as mute, pair("tcp", deadline=0.5) as both:
        endpoint = msgspec.structs.replace(decode_endpoint(both.b.endpoint()), port=mute.getsockname()[1])
        both.a.connect("c", encode_endpoint(endpoint))
        connection, _ = mute.accept()
        connection.sendall(answers)
        for handle in (1, 2):
            both.a.submit(handle, "c", both.writes((0, 0, MIB)), "x")
        ended: list[Completion] = []
        while len(ended) < 2:
            ended += wait(both.a)
        assert [one.error for one in ended] == ["no answer of the peer within 0.5 s"] * 2
        connection.close()


def test_a_port_that_does_not_welcome_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_tcp, "CONNECT_DEADLINE", 0.2)
    with socket.create_server((HOST, 0)) as mute, pair("tcp") as both:
        endpoint = msgspec.structs.replace(decode_endpoint(both.b.endpoint()), port=mute.getsockname()[1])
        both.a.connect("c", encode_endpoint(endpoint))
        both.a.submit(1, "c", both.writes((0, 0, MIB)), "x")
        assert wait(both.a) == [Completion(1, "the peer's port does not answer", quiet=True)]


@pytest.mark.parametrize(
    "lie",
    [b"HTTP/1.1 200 OK\r\n\r\n", WELCOME.pack(MAGIC, VERSION, WELCOMED) + verdict(9, None), b"\xff" * 300],
)
def test_a_target_that_lies_is_given_up(lie: bytes) -> None:
    with socket.create_server((HOST, 0)) as liar, pair("tcp") as both:
        endpoint = msgspec.structs.replace(decode_endpoint(both.b.endpoint()), port=liar.getsockname()[1])
        both.a.connect("c", encode_endpoint(endpoint))
        connection, _ = liar.accept()
        both.a.submit(1, "c", both.writes((0, 0, MIB)), "x")
        connection.sendall(lie)
        (ended,) = wait(both.a)
        assert ended.error and ended.quiet
        connection.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_dropped_peer_ends_its_handles_and_comes_back_by_connecting(path: str) -> None:
    with pair(path) as both:
        both.b.grant("x", both.areas((0, 4 * MIB)))
        for handle in range(1000, 1200):
            both.a.submit(handle, "b", both.writes((0, 0, 4 * MIB)), "x")
        both.a.drop("b")
        ended: list[Completion] = []
        while len(ended) < 200:
            ended += wait(both.a)
        assert ended[-1] == Completion(1199, "the peer was dropped", quiet=True)
        assert both.send("x", (0, 0, 10)).error == "the peer is not connected"
        both.a.connect("b", both.b.endpoint())
        assert both.send("x", (0, 0, 10)).error is None


def test_more_handles_than_the_limit_are_refused_at_once() -> None:
    engine = StreamEngine(HOST, 20.0, max_handles=2)
    for handle in range(3):
        engine.submit(handle, "nobody", [], "x")
    ended: list[Completion] = []
    while len(ended) < 3:
        ended += wait(engine)
    assert Completion(2, "too many transfers are outstanding", quiet=True) in ended
    assert engine.close() and engine.handles_outstanding == 0
