"""The `stream` engine: what is written lands exactly, and what must not land does not."""

from __future__ import annotations

import random

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.stream_rig import MIB, PATHS, pair, wait
from transfer.io.engine import Completion, EngineError, LeasingEngine
from transfer.io.stream import wire as stream_wire
from transfer.io.stream.areas import Areas
from transfer.io.stream.transfer import Transfer


@pytest.mark.parametrize("path", PATHS)
def test_bytes_land_exactly_and_nowhere_else(path: str) -> None:
    with pair(path, 8 * MIB) as both:
        assert isinstance(both.b, LeasingEngine)
        both.b.grant("all", both.areas((0, 8 * MIB)))
        expected = both.target.data.copy()
        rng = random.Random(3)
        slots = rng.sample(range(2048), 1500)
        cases = [
            [(0, 5, 3)],
            [(11, 100, 2 * MIB + 7), (3 * MIB, 3 * MIB + 1, MIB), (1, 5 * MIB, 1)],
            [(slot * 1024, 6 * MIB + slot * 512, 1 + slot % 500) for slot in slots],
            [(0, 6 * MIB, 1), (5, 6 * MIB + 3, 0), (9, 6 * MIB + 9, 4096)],
        ]
        for case in cases:
            assert both.send("all", *case).error is None
            for src, dst, nbytes in case:
                expected[dst : dst + nbytes] = both.source.data[src : src + nbytes]
            assert (both.target.data == expected).all()
        counters = both.a.counters
        assert counters.bytes_done == counters.bytes_submitted == sum(run[2] for case in cases for run in case)
        assert counters.writes_done == sum(map(len, cases)) and counters.handles_done == len(cases)
        assert both.a.handles_outstanding == 0
        assert (both.b.receiver_counters.bytes_landed == 0) == (path == "memory"), "by that path"


@pytest.mark.parametrize("path", PATHS)
def test_many_handles_end_once_each(path: str) -> None:
    with pair(path) as both:
        both.b.grant("x", both.areas((0, 4 * MIB)))
        for handle in range(1000):
            both.a.submit(handle, "b", both.writes((handle * 4096, handle * 4096, 4096)), "x")
        ended: list[Completion] = []
        while len(ended) < 1000:
            ended += wait(both.a)
        assert sorted(one.handle for one in ended) == list(range(1000))
        assert not any(one.error for one in ended)
        assert (both.target.data[: 1000 * 4096] == both.source.data[: 1000 * 4096]).all()


def test_a_lease_of_more_areas_than_one_message_takes() -> None:
    with pair("memory", 8 * MIB) as both:
        both.b.grant("many", both.areas(*((at, 64) for at in range(0, 8 * MIB, 128))))
        assert both.send("many", (0, 8 * MIB - 128, 64), (1, 256, 64)).error is None
        assert both.send("many", (0, 64, 64)).error == "a write leaves the areas of its lease"
        assert not both.target.data[64:128].any()
        assert both.b.receiver_counters.bytes_landed == 0


@given(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=12), st.integers(1, 3000))
@settings(max_examples=100, deadline=None)
def test_frames_hold_each_byte_once_and_in_order(lengths: list[int], small: int) -> None:
    writes = [(at * 10**9, at * 10**10 + 7, length) for at, length in enumerate([*lengths, *[small] * small], 1)]
    transfer = Transfer(1, b"x", writes)
    cut: list[tuple[int, int, int]] = []
    while not transfer.whole:
        pieces = transfer.cut(MIB)
        assert len(pieces) <= stream_wire.FRAME_PIECES and pieces[:, 2].sum() <= MIB
        cut += map(tuple, pieces.tolist())
    joined: list[list[int]] = []
    for source, target, length in cut:
        assert length > 0
        if joined and (source, target) == (sum(joined[-1][::2]), joined[-1][1] + joined[-1][2]):
            joined[-1][2] += length
        else:
            joined.append([source, target, length])
    assert joined == [list(write) for write in writes if write[2]]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20))), st.integers(1, 70), st.integers(1, 30))
def test_an_area_covers_what_lies_in_it(areas: list[tuple[int, int]], start: int, length: int) -> None:
    inside = {at for address, nbytes in areas for at in range(address, address + nbytes)}
    numbers = [numpy.array([value], dtype=numpy.uint64) for value in (start, length)]
    assert Areas(areas).cover(numbers[0], numbers[1]) == (set(range(start, start + length)) <= inside)


def test_an_area_is_not_fooled_by_numbers_that_wrap() -> None:
    areas = Areas([(4096, 4096)])
    for address, length in [(5000, 2**64 - 4000), (2**64 - 1, 4097), (8191, 2), (8192, 1), (0, 1)]:
        assert not areas.cover(numpy.array([address], dtype=numpy.uint64), numpy.array([length], dtype=numpy.uint64))
    for bad in [(0, 5), (5, 0), (2**64 - 5, 10), (2**64, 1), (-1, 5)]:
        with pytest.raises(ValueError):
            Areas([bad])


@pytest.mark.parametrize("path", PATHS)
def test_a_write_without_a_lease_or_outside_of_it_lands_nowhere(path: str) -> None:
    with pair(path) as both:
        both.b.grant("x", both.areas((4096, 4096), (8192, 100), (20000, 10)))
        assert "no such lease" in (both.send("y", (0, 4096, 10)).error or "")
        for bad in [(4095, 2), (8291, 2), (8292, 1), (19999, 5), (0, 4 * MIB), (20000, 11)]:
            ended = both.send("x", (0, 4100, 7), (0, *bad))
            assert ended.error == "a write leaves the areas of its lease" and ended.quiet
        assert not both.target.data.any()
        assert both.send("x", (0, 4096, 4196), (0, 20000, 10)).error is None, "the connection goes on"
        assert both.a.counters.handles_failed == 7


def test_only_registered_memory_is_granted_or_sent() -> None:
    with pair("tcp") as both:
        stranger = numpy.zeros(8192, dtype=numpy.uint8)
        with pytest.raises(EngineError, match="leaves the registered memory"):
            both.b.grant("x", [(int(stranger.ctypes.data), 8192)])
        with pytest.raises(EngineError, match="leaves the registered memory"):
            both.b.grant("x", both.areas((4 * MIB - 1, 2)))
        both.b.grant("x", both.areas((0, 8192)))
        with pytest.raises(EngineError, match="granted already"):
            both.b.grant("x", both.areas((0, 8192)))
        both.a.submit(1, "b", [(int(stranger.ctypes.data), both.target.address, 10)], "x")
        assert wait(both.a) == [Completion(1, "a write's source is not registered", quiet=True)]
        both.a.submit(2, "b", both.writes((0, 0, 10)), "")
        assert wait(both.a) == [Completion(2, "a write needs a lease of the peer", quiet=True)]
        both.a.submit(3, "nobody", both.writes((0, 0, 10)), "x")
        assert wait(both.a) == [Completion(3, "the peer is not connected", quiet=True)]
        both.a.submit(4, "b", [(-5, 1, 1)], "x")
        assert "no writes" in (wait(both.a)[0].error or "")
        both.a.submit(5, "b", [], "x")
        assert wait(both.a) == [Completion(5)]
        assert not both.target.data.any()
        for bad in [(0, 10), (5, 0)]:
            with pytest.raises(EngineError, match="no region"):
                both.b.register(*bad)
