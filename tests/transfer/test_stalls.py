"""Rows T1 to T5 on every real engine: writes that come late, are stopped in mid flight, or fail."""

from __future__ import annotations

import time

import pytest

from tests.transfer.faults import cut, sockets
from tests.transfer.rig import DECODE, PREFILL, Rig, on_real_engines
from transfer.io.engine import Completion
from transfer.replacement import ReplacementLimits

CHUNK, TOKENS = 8, 24
A, B = list(range(6)), list(range(10, 16))  # source pages
TARGET = [3, 4, 5, 9, 1, 2]  # of both: B has to take what A leaves


def landed(rig: Rig) -> int:
    return sum(port.counters().handles_done for port in rig.senders)


def chunk(rig: Rig, room: str, start: int) -> None:
    """It is in the target's pool before the next one begins."""
    before = landed(rig)
    flows = 2  # of equal pipelines
    rig.prefill(room, start, start + CHUNK)
    rig.pump(lambda: landed(rig) == before + flows)


@on_real_engines
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("what", ["its writes", "its forward"])
def test_T1_decode_waits_for_the_rank_whose_slices_come_much_later(backend: str, late: int, what: str) -> None:
    with Rig(backend, 2, 1) as rig:
        rig.begin("a/0", TOKENS, A, TARGET)
        rig.sample("a/0", b"first")
        if what == "its writes":
            rig.engines[late].holding = True
            rig.prefill("a/0", 0, TOKENS)
        else:
            layers = rig.source.shards[1 - late].layers
            rig.note(PREFILL, 1 - late, rig.senders[1 - late].written("a/0", 0, TOKENS, layers))
        rig.pump(lambda: (PREFILL, 1 - late, "a/0", "transfer") in rig.told)
        rig.idle(0.4)
        assert rig.heard(DECODE, "a/0", "transfer") == [], "half of the layers are missing"
        if what == "its writes":
            rig.engines[late].release()
        else:
            rig.note(PREFILL, late, rig.senders[late].written("a/0", 0, TOKENS, rig.source.shards[late].layers))
        rig.finish("a/0")
        (end,) = rig.heard(DECODE, "a/0", "transfer")
        assert end.good and end.payload == b"first"
        rig.assert_exact(TOKENS, A, TARGET)
        rig.close("a/0")
        rig.assert_baseline()


@on_real_engines
def test_T2_the_pages_of_an_aborted_room_with_a_stalled_write_go_to_the_next_one_only_when_fenced(
    backend: str,
) -> None:
    with Rig(backend, 2, 2) as rig:
        rig.begin("a/0", TOKENS, A, TARGET)
        chunk(rig, "a/0", 0)
        rig.engines[1].holding = True
        rig.prefill("a/0", CHUNK, 2 * CHUNK)
        rig.stop(DECODE, "a/0")
        rig.pump(lambda: rig.all_heard(PREFILL, "a/0", "transfer"))
        rig.idle(0.4)
        fenced = [(DECODE, rank, "a/0", "release") in rig.told for rank in (0, 1)]
        assert fenced == [True, rig.leased], "a revoked lease is a fence, a sender with a write in flight is none"
        assert (PREFILL, 1, "a/0", "release") not in rig.told, "its write may still read them"
        if not rig.leased:
            assert [port.side.unfenced() for port in rig.receivers] == [0, 1], "quarantined"
            rig.engines[1].release()
            rig.pump(lambda: rig.all_heard(DECODE, "a/0", "release"))
        rig.engines[1].holding, held = False, rig.engines[1].held
        rig.engines[1].held = []
        for pool in rig.dst:
            pool.data[:, :, TARGET] = 0x55
        rig.begin("b/0", TOKENS, B, TARGET)
        chunk(rig, "b/0", 0)
        rig.engines[1].held = held  # those of A, if its lease was revoked before them
        rig.engines[1].release()
        rig.pump(lambda: rig.all_heard(PREFILL, "a/0", "release"))
        for pool in rig.src:
            pool.data[:, :, A] = 0x99  # their next owner's: none of it may arrive anywhere
        chunk(rig, "b/0", CHUNK)
        chunk(rig, "b/0", 2 * CHUNK)
        rig.sample("b/0", b"b")
        rig.finish("b/0")
        rig.assert_exact(TOKENS, B, TARGET)
        assert all(seen.good for seen in rig.heard(DECODE, "b/0", "transfer"))
        rig.close("a/0")
        rig.close("b/0")
        rig.assert_baseline()
        rig.idle(0.2)
        rig.assert_exact(TOKENS, B, TARGET)


@on_real_engines
@pytest.mark.parametrize("by", [DECODE, PREFILL])
@pytest.mark.parametrize("before", [1, 2], ids=["second chunk", "last chunk"])
def test_T3_an_abort_while_a_chunk_is_in_flight_on_rank_1_leaves_nothing_behind(
    backend: str, by: str, before: int
) -> None:
    with Rig(backend, 2, 2) as rig:
        rig.begin("a/0", TOKENS, A, TARGET)
        for number in range(before):
            chunk(rig, "a/0", number * CHUNK)
        rig.engines[1].holding = True
        rig.prefill("a/0", before * CHUNK, (before + 1) * CHUNK)
        rig.sample("a/0", b"never")
        rig.turn()
        rig.stop(by, "a/0")
        other = PREFILL if by == DECODE else DECODE
        rig.pump(lambda: (other, 1, "a/0", "transfer") in rig.told)
        assert not rig.told[other, 1, "a/0", "transfer"].good
        rig.engines[1].release()
        rig.stop(other, "a/0")  # its log ends the request as well
        rig.pump(lambda: all(rig.all_heard(side, "a/0", "release") for side in (PREFILL, DECODE)))
        rig.close("a/0")
        rig.assert_baseline()
        rig.hand_over("b/0", TOKENS, B, TARGET)
        rig.assert_baseline()


@on_real_engines
def test_T3_a_stop_in_mid_transfer_fences_before_it_releases(backend: str) -> None:
    """48 MiB per source rank; what lands after the release of the pages would be seen."""
    pages = list(range(24))
    with Rig(backend, 2, 2, layers=4, pages=24, page_size=64, bytes_per_token=32768) as rig:
        rig.begin("a/0", 24 * 64, pages, pages)
        rig.prefill("a/0", 0, 24 * 64)
        assert all(port.side.in_flight() for port in rig.senders), "nothing left to stop"
        rig.stop(DECODE, "a/0")
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "release"))
        frozen = [pool.data.copy() for pool in rig.dst]
        rig.pump(lambda: rig.all_heard(PREFILL, "a/0", "transfer") and rig.all_heard(PREFILL, "a/0", "release"))
        assert not any(o.good for o in rig.heard(PREFILL, "a/0", "transfer"))
        assert [port.side.in_flight() for port in rig.senders] == [0, 0]
        for pool in rig.src:
            pool.data[:] = 0x11
        time.sleep(0.3)
        for pool, then in zip(rig.dst, frozen, strict=True):
            assert (pool.data == then).all(), "bytes landed after the fence"


@on_real_engines
@pytest.mark.parametrize("quiet", [True, False], ids=["never began", "unknown fate"])
def test_T4_a_failed_post_on_one_rank_is_known_within_a_second_by_no_timer(backend: str, quiet: bool) -> None:
    with Rig(backend, 2, 2, peer_timeout=300.0) as rig:
        rig.hand_over("warm/0", TOKENS, A, TARGET)
        rig.begin("a/0", TOKENS, A, TARGET)
        rig.engines[1].failures.append(Completion(0, "planted", quiet))
        rig.prefill("a/0", 0, CHUNK)
        failed = time.monotonic()
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "transfer"), seconds=5.0)
        assert time.monotonic() - failed < 1.0
        assert not any(seen.good for seen in rig.heard(DECODE, "a/0", "transfer"))
        told = rig.told[PREFILL, 1, "a/0", "transfer"]
        assert not told.good and told.reason == "write to decode rank 1: planted"
        assert "planted" in rig.told[DECODE, 1, "a/0", "transfer"].reason
        rig.stop(PREFILL, "a/0")
        if not quiet:
            rig.idle(0.3)
            assert (PREFILL, 1, "a/0", "release") not in rig.told
            assert ((DECODE, 1, "a/0", "release") in rig.told) == rig.leased
            rig.engines[1].end_well(rig.engines[1].failed[0])
        rig.pump(lambda: all(rig.all_heard(side, "a/0", "release") for side in (PREFILL, DECODE)))
        rig.close("a/0")
        rig.hand_over("b/0", TOKENS, B, TARGET)
        rig.assert_baseline()


@on_real_engines
def test_T5_after_failed_writes_the_next_requests_work_at_once(backend: str) -> None:
    with Rig(backend, 2, 2) as rig:
        for number in range(3):
            room = f"a{number}/0"
            rig.engines[number % 2].failures.append(Completion(0, "planted", quiet=True))
            rig.begin(room, TOKENS, A, TARGET)
            rig.prefill(room, 0, TOKENS)
            rig.pump(lambda room=room: rig.all_heard(DECODE, room, "transfer"))  # type: ignore[misc]
            assert not rig.told[DECODE, number % 2, room, "transfer"].good
            for side in (DECODE, PREFILL):
                rig.stop(side, room)
                rig.pump(lambda side=side, room=room: rig.all_heard(side, room, "release"))  # type: ignore[misc]
            rig.close(room)
            rig.hand_over(f"b{number}/0", TOKENS, B, TARGET)
        rig.assert_baseline()


@on_real_engines
def test_T5_broken_connections_cost_at_most_the_rooms_in_flight(backend: str) -> None:
    limits = ReplacementLimits(replace_after=0.3, drain=0.5, tail=0.5, settle=0.1, backoff=0.2)
    with Rig(backend, 1, 1, limits=limits) as rig:
        before = sockets()
        rig.hand_over("warm/0", TOKENS, A, TARGET)
        made = [name for name in sockets() if name not in before]  # both ends of the link's, and the engines'
        assert len(made) > 2 and cut(made) > 0, "the link's alone"
        for number in range(40):
            room = f"a{number}/0"
            rig.begin(room, TOKENS, B, TARGET)
            rig.prefill(room, 0, TOKENS)
            rig.sample(room, b"t")
            rig.finish(room)
            good = all(seen.good for side in (PREFILL, DECODE) for seen in rig.heard(side, room, "transfer"))
            if good:
                rig.assert_exact(TOKENS, B, TARGET)
            else:
                rig.pump(lambda room=room: rig.all_heard(DECODE, room, "release"))  # type: ignore[misc]
            rig.close(room)
            if good:
                break
        assert good, "the peer is avoided"
        for number in range(3):
            rig.hand_over(f"b{number}/0", TOKENS, A, TARGET)
        rig.assert_baseline()
