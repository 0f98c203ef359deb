"""A prefill rank in another process is killed or frozen in the middle of a transfer."""

from __future__ import annotations

import signal
import time

import pytest

from tests.transfer.prefill_process import PAGES
from tests.transfer.processes import DecodeRank, prefill_process
from tests.transfer.rig import PREFILL, on_real_engines
from transfer.io.engine import LeasingEngine

REUSED = 0x55


@on_real_engines
def test_a_killed_prefill_is_noticed_in_time_and_fenced_only_by_proof(backend: str) -> None:
    decode = DecodeRank(backend, peer_timeout=2.0)
    with prefill_process(backend) as (prefill, address):
        decode.port.introduce(PREFILL, [address])
        decode.begin(prefill, "a/0", endless=True)
        decode.pump(lambda: decode.landed() > 0)
        prefill.kill()
        prefill.wait()
        killed = time.monotonic()
        decode.pump(lambda: ("a/0", "transfer") in decode.told)
        assert time.monotonic() - killed < 2.0 + 2.5
        assert not decode.told["a/0", "transfer"].good
        if isinstance(decode.port.engine, LeasingEngine):
            decode.pump(lambda: ("a/0", "release") in decode.told)
        else:
            assert ("a/0", "release") not in decode.told
            assert decode.port.side.unfenced() == 1
        decode.note(decode.port.peer_dead(PREFILL, 1, "reaped"))
        assert decode.told["a/0", "release"].good
        assert decode.port.close("a/0") == [] and decode.port.side.rooms() == ()
    with prefill_process(backend, epoch=2) as (prefill, address):
        decode.port.introduce(PREFILL, [address])
        decode.deliver(prefill, "a/1", 0, PAGES)
    decode.port.close_port()


@on_real_engines
def test_T2_a_frozen_prefill_lands_nothing_in_pages_that_were_given_to_the_next_room(backend: str) -> None:
    """It is stopped by the system in mid write. A lease may be revoked meanwhile, if no copy is under way."""
    decode = DecodeRank(backend, peer_timeout=60.0)
    leased = isinstance(decode.port.engine, LeasingEngine)
    with prefill_process(backend) as (prefill, address):
        decode.port.introduce(PREFILL, [address])
        decode.begin(prefill, "a/0", endless=True)
        decode.pump(lambda: decode.landed() > 0)
        prefill.send_signal(signal.SIGSTOP)
        decode.note(decode.port.stop("a/0", "abort"))
        decode.idle(0.5)
        early = ("a/0", "release") in decode.told
        assert leased or not early
        assert backend != "stream-tcp" or early, "over a connection nobody can be in mid copy"
        if early:
            decode.pool.data[:] = REUSED
        prefill.send_signal(signal.SIGCONT)
        decode.pump(lambda: ("a/0", "release") in decode.told)
        if not early:
            decode.pool.data[:] = REUSED
        decode.idle(0.5)
        assert (decode.pool.data == REUSED).all(), "bytes landed after the fence"
        decode.port.close("a/0")
        decode.deliver(prefill, "b/0", 0, PAGES)
        assert not decode.port.side.rooms()
    decode.port.close_port()


@pytest.mark.parametrize("backend", ["mooncake"])
def test_a_frozen_prefill_fails_its_room_and_fences_it_when_it_thaws(backend: str) -> None:
    decode = DecodeRank(backend, peer_timeout=0.8)
    with prefill_process(backend) as (prefill, address):
        decode.port.introduce(PREFILL, [address])
        decode.begin(prefill, "a/0", endless=True)
        decode.pump(lambda: decode.landed() > 0)
        prefill.send_signal(signal.SIGSTOP)
        decode.pump(lambda: ("a/0", "transfer") in decode.told)
        assert "no word" in decode.told["a/0", "transfer"].reason
        assert ("a/0", "release") not in decode.told
        prefill.send_signal(signal.SIGCONT)
        decode.pump(lambda: ("a/0", "release") in decode.told)
        assert decode.told["a/0", "release"].good, "it came back and said that all of its writes have ended well"
    decode.port.close_port()
