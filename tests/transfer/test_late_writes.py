"""Real libraries, real deaths: a decode rank is killed or frozen while it is written to, and the engine replaced."""

from __future__ import annotations

import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from tests.transfer.pools import Pool, pipeline
from tests.transfer.prefill_process import LAYERS, PAGE_SIZE, PAGES
from tests.transfer.processes import PrefillRank
from tests.transfer.rig import HOST, UNLEASED, engine_for, on_real_engines
from transfer.io.engine import LeasingEngine, TransferEngine, make_engine
from transfer.replacement import DEFAULT_LIMITS


@pytest.mark.parametrize("backend", UNLEASED)
def test_a_killed_decode_rank_holds_no_pages_and_another_one_is_served_all_the_while(backend: str) -> None:
    rank = PrefillRank(backend, replace(DEFAULT_LIMITS, replace_after=1.0))
    try:
        victim, healthy = rank.decode(backend, "victim"), rank.decode(backend, "healthy")
        rank.pump(lambda: "ready" in victim.said and "ready" in healthy.said)
        rank.deliver(victim, "warm/0", 0, 1)
        rank.deliver(healthy, "warm/1", 0, 1)
        rank.begin(victim, "a/0", 0, PAGES)
        victim.process.kill()
        rank.pump(rank.port.side.unproven)
        number = 0
        while ("a/0", "release") not in rank.told or number < 3:
            rank.deliver(healthy, f"b/{number}", number % PAGES, 1)
            rank.idle(0.05)
            number += 1
            assert number < 500
        assert not rank.told["a/0", "transfer"].good and rank.port.slot.replacements == 1
        assert rank.port.side.unproven() == 0 and rank.port.side.trailing() > 0
        rank.deliver(healthy, "c/0", 3, 20)
        assert rank.stall < 1.0, "the loop waited for an engine"
    finally:
        rank.end()


def frozen(backend: str, thaw_before_the_tail: bool) -> None:
    """Bytes that kernels hold of a destroyed engine land before the fence, and none after it."""
    tail = 4.0
    rank = PrefillRank(backend, replace(DEFAULT_LIMITS, replace_after=0.5, drain=1.0, tail=tail))
    try:
        victim = rank.decode(backend, "victim")
        rank.pump(lambda: "ready" in victim.said)
        rank.deliver(victim, "warm/0", 0, 1)
        victim.process.send_signal(signal.SIGSTOP)
        for seen in rank.port.open("a/0", "victim", 0, (PAGES - 1) * PAGE_SIZE):
            raise AssertionError(seen)
        victim.say("open", "a/0", 1, PAGES - 1)
        victim.process.send_signal(signal.SIGCONT)
        rank.pump(lambda: ("a/0", "bootstrap") in rank.told)
        rank.port.start("a/0", range(1, PAGES))
        rank.port.first_token("a/0", b"t")
        rank.port.written("a/0", 0, (PAGES - 1) * PAGE_SIZE, (0, LAYERS))
        rank.pump(lambda: rank.port.counters().handles_submitted > 1)
        victim.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        rank.pump(lambda: ("a/0", "release") in rank.told, seconds=60)
        destroyed = time.monotonic()
        print(f"{backend}: released {destroyed - stopped:.1f} s after the freeze", file=sys.stderr)
        assert rank.port.slot.replacements >= 1
        rank.pool.data[:] = 0x99  # the next owner of the source pages: none of it may arrive anywhere
        rank.idle(1.0 if thaw_before_the_tail else tail + 3.0)
        before = victim.memory()
        victim.process.send_signal(signal.SIGCONT)
        if thaw_before_the_tail:
            rank.idle(0.5)
            assert "release a/0" not in victim.said
            assert (victim.memory() != before).any(), "nothing was on its way: the experiment shows nothing"
        rank.pump(lambda: "release a/0" in victim.said, seconds=60)
        assert time.monotonic() - destroyed > tail
        assert victim.said["transfer a/0"] == 0
        for _ in range(2):
            rank.idle(0.7)
            victim.said.pop("changed a/0", None)
            victim.say("check", "a/0")
            rank.pump(lambda: "changed a/0" in victim.said)
            assert victim.said["changed a/0"] == 0, "bytes landed after the fence"
        assert rank.stall < 1.0, "the loop waited for an engine"
    finally:
        rank.end()


@pytest.mark.parametrize("backend", ["mooncake", pytest.param("nixl", marks=pytest.mark.soak)])
def test_what_a_frozen_rank_was_sent_lands_before_the_fence(backend: str) -> None:
    frozen(backend, thaw_before_the_tail=True)


@pytest.mark.soak
@pytest.mark.parametrize("backend", UNLEASED)
def test_a_rank_that_thaws_after_the_tail_is_not_fenced_before_it_has_read_what_waits_for_it(backend: str) -> None:
    frozen(backend, thaw_before_the_tail=False)


@on_real_engines
def test_two_engines_of_one_process_register_the_same_memory_and_one_outlives_the_other(backend: str) -> None:
    pool, other = (Pool(pipeline(1, 2, 4, 64), 0, 8, seed=seed) for seed in (1, 2))
    target, first = engine_for(backend, other), engine_for(backend, pool)
    second = engine_for(backend, pool)
    write = [(pool.regions.bases[0][0], other.regions.bases[0][0], pool.regions.nbytes(0))]
    if isinstance(target, LeasingEngine):
        target.grant("room", [(other.address, other.nbytes)])
    for number, engine in ((1, first), (2, second)):
        engine.connect("t", target.endpoint())
        engine.submit(number, "t", write, "room")
        assert arrives(engine)
    assert first.close() and first.close(), "destroyed, however often it is asked"
    pool.data[:] = 0x33
    second.submit(3, "t", write, "room")
    assert arrives(second) and (other.data[0, 0] == 0x33).all()
    third = engine_for(backend, pool)
    third.connect("t", target.endpoint())
    third.submit(4, "t", write, "room")
    assert arrives(third)
    assert all(engine.close() for engine in (second, third, target))


def arrives(engine: TransferEngine) -> bool:
    end = time.monotonic() + 20.0
    while not (ended := engine.poll()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return [one.error for one in ended] == [None]


def test_the_end_of_mooncake_holds_up_nobody_even_if_a_stranger_hangs_on_its_port() -> None:
    """Its destructor holds Python's lock while it waits for whoever connected and says nothing."""
    import socket

    engine = make_engine("mooncake", HOST)
    port = int(engine.endpoint().rsplit(b":", 1)[1])
    mute = [socket.create_connection((HOST, port), timeout=2.0) for _ in range(3)]
    time.sleep(0.1)
    gaps: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not stop.wait(0.001):
            last, gap = time.monotonic(), time.monotonic() - last
            gaps.append(gap)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert engine.close()
    stop.set()
    watcher.join()
    assert max(gaps) < 2.0
    for one in mute:
        one.close()
