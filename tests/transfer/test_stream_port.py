"""The `stream` engine's port and strangers; what it costs, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.transfer.stream_rig import HOST, MIB, PATHS, Memory, Pair, Raw, frame, pair, until, wait
from transfer.io.engine import Completion, EngineError, make_engine
from transfer.io.stream import host as stream_host
from transfer.io.stream import receiver as stream_receiver
from transfer.io.stream.engine import StreamEngine
from transfer.io.stream.wire import (
    HELLO,
    MAGIC,
    VERSION,
    WELCOME,
    WELCOMED,
    decode_endpoint,
)


def bad_frames(address: int) -> list[bytes]:
    good = frame("x", 1, (address, 100))
    return [
        random.Random(1).randbytes(5000),
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(100),
        good[:4] + b"\x07" + good[5:],  # flags
        good[:6] + b"\xff\xff" + good[8:],  # a lease of 65535 bytes
        good[:16] + b"\xff\xff\xff\xff" + good[20:],  # that many pieces
        good[:20] + b"\xff\xff\xff\xff" + good[24:],  # 4 GiB of payload
        good[:16] + bytes(4) + good[20:],  # no pieces
        good[:20] + b"\x63" + good[21:] + bytes(100),  # pieces that are more than the payload
        frame("x", 1, (address, 50), (address, 2**64 - 1), (address, 51)) + bytes(100),  # sums that wrap
        frame("x", 0, (address, 1)) + b"a" + frame("x", 0, (address, 1)),  # a handle that was complete
        frame("x", 5, (address, 1), last=False) + b"a" + frame("x", 6, (address, 1)),  # one left open
    ]


def test_malformed_frames_close_their_own_connection_only() -> None:
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, 4096)))
        assert both.send("x", (0, 4000, 10)).error is None
        then = both.target.data.copy()
        bad = bad_frames(both.target.address)
        for count, data in enumerate(bad, 1):
            peer = Raw(both.b.endpoint())
            with contextlib.suppress(ConnectionError):
                peer.socket.sendall(data)
                while peer.socket.recv(4096):
                    pass
            until(lambda count=count: both.b.receiver_counters.malformed == count)  # type: ignore[misc]
            peer.socket.close()
        assert (both.target.data[1:] == then[1:]).all()
        assert both.send("x", (0, 100, 10)).error is None and both.b.receiver_counters.accepted == len(bad) + 1


def test_garbage_instead_of_a_greeting_is_counted_and_closed() -> None:
    with pair("tcp") as both:
        for seed in range(20):
            peer = Raw(both.b.endpoint(), greet=False)
            peer.socket.sendall(random.Random(seed).randbytes(HELLO.size + seed))
            assert peer.closed()
        assert both.b.receiver_counters.malformed == 20
        for hello in (HELLO.pack(MAGIC, VERSION, bytes(16), bytes(16)), HELLO.pack(MAGIC, 99, bytes(16), bytes(16))):
            peer = Raw(both.b.endpoint(), greet=False)
            peer.socket.sendall(hello)
            assert WELCOME.unpack(peer.take(WELCOME.size))[2] != WELCOMED and peer.closed()
        assert both.b.receiver_counters.strangers == 2


def test_who_asks_for_shared_memory_can_fill_neither_descriptors_nor_memory() -> None:
    target = Memory("memory", MIB)
    name = decode_endpoint(target.engine.endpoint()).memory
    before = len(os.listdir("/proc/self/fd"))
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(20)]
    for stranger in strangers:
        stranger.connect(f"\0{name}")
        stranger.settimeout(20)
        descriptors = [stranger.fileno()] * 100
        socket.send_fds(stranger, [b"\x20\0\0"], descriptors)  # of a length, so that it has to be kept
    time.sleep(0.2)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * len(strangers), "both ends of each"
    for stranger in strangers:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"\x7f")  # ... which is then 2 GiB
            assert stranger.recv(1) == b""
        stranger.close()
    target.close()


def test_a_passing_lack_of_descriptors_does_not_end_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_host, "ACCEPT_PAUSE", 0.1)
    source, target = Memory("tcp", MIB, fill=9), Memory("memory", MIB)
    endpoint = target.engine.endpoint()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        most, hardest = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hardest))
        try:
            stranger.connect(f"\0{decode_endpoint(endpoint).memory}")
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hardest))
    source.engine.connect("b", endpoint)
    target.engine.grant("x", [(target.address, MIB)])
    source.engine.submit(1, "b", [(source.address, target.address, MIB)], "x")
    assert wait(source.engine) == [Completion(1)] and target.engine.receiver_counters.accepted == 0
    source.close()
    target.close()


def test_another_user_is_sent_away_before_a_byte_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Memory("memory", MIB)
    name = decode_endpoint(target.engine.endpoint()).memory
    monkeypatch.setattr(stream_host.MessageSocket, "same_user", lambda self: False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(f"\0{name}")
        stranger.settimeout(2)
        assert stranger.recv(1) == b"", "without a deadline to wait for"
    target.close()


def test_half_a_greeting_and_half_a_frame_meet_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_receiver, "HELLO_DEADLINE", 0.2)
    monkeypatch.setattr(stream_receiver, "FRAME_DEADLINE", 0.2)
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, 4096)))
        assert both.send("x", (0, 0, 10)).error is None
        mute = Raw(both.b.endpoint(), greet=False)
        mute.socket.sendall(MAGIC)
        halves = [Raw(both.b.endpoint()) for _ in range(3)]
        whole = frame("x", 1, (both.target.address + 100, 100)) + bytes(100)
        for peer, size in zip(halves, (1, 30, len(whole) - 1), strict=True):
            peer.socket.sendall(whole[:size])
        assert mute.closed() and all(peer.closed() for peer in halves)
        assert both.b.receiver_counters.silent == 1 and both.b.receiver_counters.stalled == 3
        assert both.send("x", (0, 0, 10)).error is None, "those between frames may rest"
        assert both.b.receiver_counters.accepted == 5


def test_connections_are_bounded_and_newcomers_do_not_push_out_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_receiver, "STRANGERS", 8)
    monkeypatch.setattr(stream_receiver, "PEERS", 3)
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, 4096)))
        assert both.send("x", (0, 0, 10)).error is None
        strangers = [Raw(both.b.endpoint(), greet=False) for _ in range(30)]
        until(lambda: both.b.receiver_counters.accepted == 31)
        assert all(peer.closed() for peer in strangers[:22])
        assert both.b.receiver_counters.turned_away == 22
        peers = [Raw(both.b.endpoint()) for _ in range(2)]
        with pytest.raises(AssertionError):
            Raw(both.b.endpoint())
        assert both.send("x", (0, 0, 10)).error is None
        for peer in [*strangers, *peers]:
            peer.socket.close()


def test_a_peer_that_reads_no_verdicts_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_receiver, "UNREAD_VERDICTS", 1 << 12)

    def small(one: socket.socket) -> None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(stream_receiver, "keep_alive", small)  # which would cut it too, later
    with pair("tcp") as both:
        peer = Raw(both.b.endpoint())
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        refused = b"".join(frame("x", sequence, (both.target.address, 1)) + b"a" for sequence in range(20_000))
        with contextlib.suppress(ConnectionError):
            peer.socket.sendall(refused)
        until(lambda: both.b.receiver_counters.stalled == 1)


@pytest.mark.parametrize("path", PATHS)
def test_an_idle_engine_does_not_wake_up(path: str) -> None:
    with pair(path) as both:
        both.b.grant("x", both.areas((0, MIB)))
        assert both.send("x", (0, 0, MIB)).error is None
        time.sleep(0.1)
        threads = [both.a._thread, both.b._thread]

        def switches() -> list[str]:
            status = [Path(f"/proc/self/task/{one.native_id}/status").read_text() for one in threads]
            return [line for text in status for line in text.splitlines() if line.startswith("voluntary")]

        before, clocks = switches(), [time.pthread_getcpuclockid(one.ident) for one in threads]
        used = [time.clock_gettime(clock) for clock in clocks]
        time.sleep(0.5)
        assert switches() == before
        assert [time.clock_gettime(clock) for clock in clocks] == used


@pytest.mark.parametrize("path", PATHS)
def test_a_closed_engine_leaves_no_descriptor_and_no_thread(path: str) -> None:
    def descriptors() -> set[tuple[str, str]]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        return found

    before, threads = descriptors(), threading.active_count()
    both = Pair(path)
    both.b.grant("x", both.areas((0, MIB)))
    assert both.send("x", (0, 0, MIB)).error is None
    raw = Raw(both.b.endpoint())
    both.a.submit(99, "b", both.writes((0, 0, 4 * MIB)), "x")
    both.close()
    raw.socket.close()
    assert [one.handle for one in both.a.poll()] == [99], "it ends all the same"
    both.a.submit(100, "b", [], "x")  # of no effect, and no harm
    assert both.a.close()
    del both, raw
    assert {name for _, name in descriptors() - before if not name.startswith("/memfd:test")} == set()
    assert threading.active_count() == threads


def test_the_backend_is_chosen_by_name() -> None:
    engine = make_engine("stream", HOST)
    assert engine.name == "stream" and len(engine.endpoint()) < 1024
    assert engine.close()
    with pytest.raises(EngineError, match="cannot listen"):
        StreamEngine("192.0.2.1", 20.0)
