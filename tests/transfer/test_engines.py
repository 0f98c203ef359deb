"""Real engines, real links: bytes arrive exactly, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy
import pytest

from tests.transfer.rig import DECODE, HOST, PREFILL, REAL, Rig, on_real_engines
from transfer.io.engine import Completion, EngineError, LeasingEngine, TransferEngine, make_engine

on_each_engine = pytest.mark.parametrize("backend", ["mooncake", "nixl", "stream"])


@pytest.mark.parametrize("backend", [*REAL, "local"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (3, 2), (1, 4)])
def test_a_prompt_arrives_in_its_pages_and_nowhere_else(backend: str, prefill: int, decode: int) -> None:
    src_pages, dst_pages, tokens = [5, 6, 7, 1, 12], [3, 4, 9, 10, 30], 18
    with Rig(backend, prefill, decode) as rig:
        before = [pool.data.copy() for pool in rig.dst]
        rig.begin("a/0", tokens, src_pages, dst_pages)
        for start, end in ((0, 7), (7, 8), (8, tokens)):
            rig.prefill("a/0", start, end)
        rig.sample("a/0", b"first")
        rig.finish("a/0")
        assert [o.payload for o in rig.heard(DECODE, "a/0", "transfer")] == [b"first"] + [b""] * (decode - 1)
        assert all(o.good for o in rig.heard(PREFILL, "a/0", "transfer") + rig.heard(DECODE, "a/0", "transfer"))
        for layer in range(6):
            source = next(p for p in rig.src if p.regions.layers[0] <= layer < p.regions.layers[1])
            target = next(p for p in rig.dst if p.regions.layers[0] <= layer < p.regions.layers[1])
            assert (target.tokens(layer, dst_pages, tokens) == source.tokens(layer, src_pages, tokens)).all()
        for pool, old in zip(rig.dst, before, strict=True):
            others = [page for page in range(32) if page not in dst_pages]
            assert (pool.data[:, :, others] == old[:, :, others]).all()
            assert (pool.data[:, :, dst_pages[-1], 2:] == old[:, :, dst_pages[-1], 2:]).all(), "beyond the prompt"
        counted = [port.engine.counters for port in rig.senders]
        assert sum(c.bytes_done for c in counted) == tokens * 6 * 64
        assert sum(c.bytes_submitted for c in counted) == tokens * 6 * 64
        assert [port.side.in_flight() for port in rig.senders] == [0] * prefill
        for port in rig.ports():
            port.close("a/0")
            assert port.side.rooms() == ()


@on_real_engines
def test_a_peer_that_is_gone_ends_a_transfer_within_its_bound(backend: str) -> None:
    with Rig(backend, 1, 1, peer_timeout=1.0) as rig:
        rig.begin("a/0", 8, [0, 1], [2, 3])
        rig.senders[0].link.close()
        started = time.monotonic()
        rig.senders, sender = [], rig.senders
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "transfer"))
        assert time.monotonic() - started < 4
        assert "no word" in rig.heard(DECODE, "a/0", "transfer")[0].reason
        if not rig.leased:
            assert rig.heard(DECODE, "a/0", "release") == [], "a lost peer is no fence"
        rig.note(DECODE, 0, rig.receivers[0].peer_dead(PREFILL, 1, "reaped"))
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "release"), 5.0)
        sender[0].engine.close()


def wait(engine: TransferEngine, seconds: float = 20.0) -> list[Completion]:
    end = time.monotonic() + seconds
    while not (ended := engine.poll()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return ended


@on_each_engine
def test_an_engine_moves_pieces_of_any_size_and_refuses_strangers(backend: str) -> None:
    a, b = (make_engine(backend, HOST) for _ in range(2))
    source = numpy.random.default_rng(1).integers(0, 256, 5 << 20, dtype=numpy.uint8)
    target = numpy.zeros(5 << 20, dtype=numpy.uint8)
    a.register(int(source.ctypes.data), source.nbytes)
    b.register(int(target.ctypes.data), target.nbytes)
    if isinstance(b, LeasingEngine):
        b.grant("room", [(int(target.ctypes.data), target.nbytes)])
    a.submit(1, "nobody", [(int(source.ctypes.data), int(target.ctypes.data), 10)], "room")
    assert wait(a) == [Completion(1, "the peer is not connected", quiet=True)]
    a.connect("b", b.endpoint())
    a.connect("b", b.endpoint())
    writes = [
        (int(source.ctypes.data), int(target.ctypes.data), 3),
        (int(source.ctypes.data) + 100, int(target.ctypes.data) + 100, (4 << 20) + 7),
    ]
    a.submit(2, "b", writes, "room")
    assert wait(a) == [Completion(2)]
    assert (target[:3] == source[:3]).all() and not target[3:100].any()
    assert (target[100 : (4 << 20) + 107] == source[100 : (4 << 20) + 107]).all() and not target[
        (4 << 20) + 107 :
    ].any()
    assert a.counters.bytes_done == (4 << 20) + 10
    assert a.handles_outstanding == 0
    for engine in (a, b):
        engine.close()


def test_mooncake_reports_a_write_the_target_refuses_and_does_not_call_it_quiet() -> None:
    a, b = make_engine("mooncake", HOST), make_engine("mooncake", HOST)
    source = numpy.zeros(4096, dtype=numpy.uint8)
    a.connect("b", b.endpoint())
    a.submit(1, "b", [(int(source.ctypes.data), int(source.ctypes.data), 4096)], "room")
    (ended,) = wait(a)
    assert ended.error is not None and not ended.quiet
    a.connect("gone", b"mooncake/1 127.0.0.1:9")
    a.submit(2, "gone", [(int(source.ctypes.data), int(source.ctypes.data), 4096)], "room")
    (ended,) = wait(a)
    assert ended.error is not None and ended.quiet, "nothing was ever sent to a peer that refused the connection"
    for engine in (a, b):
        engine.close()


@on_each_engine
def test_an_idle_engine_uses_no_cpu_and_its_process_exits_well(backend: str) -> None:
    """Its own process: the libraries' other threads count too, and one of them is known to crash at exit."""
    program = f"""
import time
from transfer.io.engine import make_engine
engine = make_engine({backend!r}, "127.0.0.1")
engine.endpoint()
time.sleep(0.3)
before = time.process_time(); time.sleep(1.0); used = time.process_time() - before
import sys
other = "nixl" if {backend!r} == "mooncake" else "mooncake"
assert not any(name.split(".")[0] == other for name in sys.modules), other
print("used", used)
engine.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    used = float(done.stdout.split("used")[1].split()[0])
    assert used < 0.08, f"{used:.3f} s of CPU in an idle second"


def test_an_engine_needs_a_name_and_an_address_that_peers_can_use() -> None:
    with pytest.raises(EngineError, match="address"):
        make_engine("local", "0.0.0.0")
    with pytest.raises(EngineError, match="unknown transfer backend"):
        make_engine("carrier-pigeon", HOST)


def test_a_missing_library_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(EngineError, match="libibverbs1 libnuma1 libcurl4"):
        make_engine("mooncake", HOST)
