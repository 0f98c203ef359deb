"""Row T6: a rank of either side is killed under load and comes back, on every real engine."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.transfer.pools import BLANK
from tests.transfer.prefill_process import PAGES
from tests.transfer.processes import DecodeRank, PrefillRank, prefill_process
from tests.transfer.rig import PREFILL, on_real_engines
from transfer.io.engine import LeasingEngine
from transfer.replacement import DEFAULT_LIMITS

HALF = PAGES // 2
REUSED = 0x55
OTHER = "other"


@on_real_engines
def test_T6_a_prefill_restarts_under_load_and_nobody_else_notices(backend: str) -> None:
    decode = DecodeRank(backend, peer_timeout=3.0)
    with prefill_process(backend, instance=OTHER) as (other, other_address):
        decode.port.introduce(OTHER, [other_address])
        with prefill_process(backend) as (victim, address):
            decode.port.introduce(PREFILL, [address])
            decode.deliver(victim, "warm/0", 0, 1)
            decode.deliver(other, "other/0", HALF, 1, OTHER)
            decode.pool.data[:, :, :HALF] = BLANK
            decode.begin(victim, "a/0", 0, HALF, endless=True)
            decode.pump(lambda: decode.landed() > 2)
            victim.kill()
            victim.wait()
            killed = time.monotonic()
            for number in range(1, 4):
                decode.deliver(other, f"other/{number}", HALF + 4 * (number - 1), 4, OTHER)
        with prefill_process(backend, epoch=2) as (victim, address):
            decode.note(decode.port.introduce(PREFILL, [address]))
            decode.pump(lambda: ("a/0", "transfer") in decode.told)
            assert time.monotonic() - killed < 10.0 and not decode.told["a/0", "transfer"].good
            if isinstance(decode.port.engine, LeasingEngine):
                decode.pump(lambda: ("a/0", "release") in decode.told)
            else:
                assert ("a/0", "release") not in decode.told, "the new one cannot speak for the old one"
            decode.note(decode.port.peer_dead(PREFILL, 1, "reaped"))
            assert decode.told["a/0", "release"].good
            decode.port.close("a/0")
            decode.pool.data[:, :, :HALF] = REUSED
            decode.deliver(victim, "b/0", 1, HALF - 1)
            decode.deliver(other, "other/9", HALF, HALF, OTHER)
            assert (decode.pool.data[:, :, 0] == REUSED).all(), "only the old one knew this page"
            assert not decode.port.side.rooms()
    decode.port.close_port()


@on_real_engines
def test_T6_a_decode_rank_restarts_under_load_and_no_old_mapping_is_written_to(backend: str) -> None:
    rank = PrefillRank(backend, replace(DEFAULT_LIMITS, replace_after=1.0))
    try:
        victim, healthy = rank.decode(backend, "victim"), rank.decode(backend, "healthy")
        rank.pump(lambda: "ready" in victim.said and "ready" in healthy.said)
        rank.deliver(victim, "warm/0", 0, 1)
        rank.deliver(healthy, "warm/1", 0, 1)
        rank.begin(victim, "a/0", 0, HALF)
        victim.process.kill()
        again = rank.decode(backend, "victim", epoch=2)
        number = 0
        while "ready" not in again.said:
            rank.deliver(healthy, f"healthy/{number}", number % PAGES, 1)
            rank.idle(0.05)
            number += 1
            assert number < 300
        rank.deliver(again, "b/0", HALF, 3)
        assert not rank.told["a/0", "transfer"].good
        rank.pump(lambda: ("a/0", "release") in rank.told, seconds=30.0)
        rank.deliver(again, "b/1", HALF + 3, 3)
        rank.deliver(healthy, "healthy/z", 0, PAGES)
        again.say("stray")
        rank.pump(lambda: "stray" in again.said)
        assert again.said["stray"] == 0, "bytes for the dead incarnation arrived at the new one"
        assert rank.stall < 1.0, "the loop waited for an engine"
    finally:
        rank.end()
