"""The `stream` engine: nothing lands after a revoke, whatever the sender does."""

from __future__ import annotations

import contextlib
import os
import select
import signal

import pytest

from tests.transfer.stream_rig import MIB, PATHS, Memory, Raw, end, frame, other_process, pair, revoke, until, wait
from transfer.io.engine import Completion


def test_a_revoke_in_the_middle_of_a_frame_is_complete_at_once() -> None:
    with pair("tcp") as both:
        both.b.grant("x", both.areas((0, MIB)))
        peer = Raw(both.b.endpoint())
        peer.socket.sendall(frame("x", 1, (both.target.address, 100_000), (both.target.address + 200_000, 100_000)))
        peer.socket.sendall(b"\x01" * 120_000)
        until(lambda: both.b.receiver_counters.bytes_landed == 120_000)
        revoke(both.b, "x")
        then = both.target.data.copy()
        assert then[200_000:220_000].all() and not then[220_000:].any()
        assert peer.verdict() == (1, "the lease was revoked")
        peer.socket.sendall(b"\x02" * 80_000)
        peer.socket.sendall(frame("x", 2, (both.target.address, 10)) + b"\x03" * 10)
        assert peer.verdict() == (2, "there is no such lease, or it was revoked")
        assert (both.target.data == then).all()
        both.b.grant("x", both.areas((0, 10)))
        peer.socket.sendall(frame("x", 3, (both.target.address, 10)) + b"\x04" * 10)
        assert peer.verdict() == (3, None)
        assert both.target.data[:10].tolist() == [4] * 10


@pytest.mark.parametrize("path", PATHS)
def test_leases_are_revoked_once_and_unknown_ones_at_once(path: str) -> None:
    with pair(path) as both:
        revoke(both.b, "never granted")
        both.b.grant("x", both.areas((0, 100)))
        assert both.send("x", (0, 0, 100)).error is None
        revoke(both.b, "x")
        revoke(both.b, "x")
        assert "revoked" in (both.send("x", (0, 0, 100)).error or "")
        both.b.grant("x", both.areas((200, 100)))
        assert both.send("x", (0, 0, 100)).error == "a write leaves the areas of its lease"
        assert both.send("x", (0, 200, 100)).error is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fate", ["busy", "stopped", "killed"])
def test_nothing_lands_after_a_revoke_whatever_the_sender_does(path: str, fate: str) -> None:
    target = Memory(path, 64 * MIB)
    target.engine.grant("x", [(target.address, 64 * MIB)])
    sender = other_process("send", target.engine.endpoint().decode(), str(target.address), str(64 * MIB))
    try:
        for _ in range(3):
            assert sender.stdout.readline() == "sent\n"
        if fate == "stopped":
            sender.send_signal(signal.SIGSTOP)
        elif fate == "killed":
            sender.kill()
        target.engine.revoke(1, "x")
        if fate == "stopped" and path == "memory":
            with contextlib.suppress(AssertionError):  # it may have been stopped in mid copy
                assert wait(target.engine, 0.5) == [Completion(1)]
                target.engine.revoke(1, "x")
            sender.send_signal(signal.SIGCONT)
        assert wait(target.engine) == [Completion(1)]
        target.data[:] = 0
        if fate == "stopped":
            sender.send_signal(signal.SIGCONT)
        if fate != "killed":
            assert "revoked" in next(line for line in sender.stdout if line != "sent\n")
        assert not target.data.any()
        assert (target.engine.receiver_counters.bytes_landed > 0) == (path == "tcp")
    finally:
        end(sender)
        target.close()


def test_a_process_stopped_in_mid_copy_holds_the_fence_until_it_is_dead() -> None:
    target = Memory("memory", MIB)
    target.engine.grant("x", [(target.address, MIB)])
    holder = other_process("hold", target.engine.endpoint().decode())
    try:
        assert holder.stdout.readline() == "held\n"
        target.engine.grant("y", [(target.address, MIB)])
        target.engine.revoke(1, "x")
        target.engine.revoke(2, "x")
        revoke(target.engine, "y")
        assert not select.select([target.engine.completion_fd], [], [], 0.3)[0], "it may still be written"
        holder.kill()
        assert wait(target.engine) == [Completion(1), Completion(2)]
    finally:
        end(holder)
        target.close()


def test_an_engine_is_not_closed_while_a_stopped_process_is_in_mid_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.io.stream.engine.CLOSE_TIMEOUT", 0.3)
    target = Memory("memory", MIB)
    target.engine.grant("x", [(target.address, MIB)])
    holder = other_process("hold", target.engine.endpoint().decode())
    try:
        assert holder.stdout.readline() == "held\n"
        target.engine.revoke(1, "x")
        assert not target.engine.close()
        end(holder)
        until(target.engine.close)
        assert target.engine.poll() == [Completion(1)]
        assert target.engine.close()
    finally:
        end(holder)
        os.close(target.descriptor)
