"""Row T13 on every real engine: one bit of a slice is flipped in the target's pool after its write has ended."""

from __future__ import annotations

import pytest

from tests.transfer.rig import DECODE, PREFILL, Rig, on_real_engines

TOKENS, SRC, DST = 22, [5, 6, 7, 1, 12, 0], [3, 4, 9, 10, 30, 31]


def counted(rig: Rig) -> tuple[int, int]:
    """Slices that were found damaged, and slices that were sent again."""
    damaged = sum(port.side.counters.damaged for port in rig.receivers)
    return damaged, sum(port.side.counters.again for port in rig.senders)


@on_real_engines
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("where", ["first", "last"])
def test_T13_a_slice_damaged_once_is_fetched_again_and_exact(
    backend: str, prefill: int, decode: int, where: str
) -> None:
    with Rig(backend, prefill, decode) as rig:
        rig.begin("a/0", TOKENS, SRC, DST)
        rig.engines[-1].flips = where == "first"
        rig.prefill("a/0", 0, 9)
        rig.pump(lambda: not rig.engines[-1].flips and not any(port.side.in_flight() for port in rig.senders))
        rig.engines[-1].flips = where == "last"
        rig.prefill("a/0", 9, TOKENS)
        rig.sample("a/0", b"t")
        rig.finish("a/0")
        assert all(seen.good for side in (PREFILL, DECODE) for seen in rig.heard(side, "a/0", "transfer"))
        rig.assert_exact(TOKENS, SRC, DST)
        assert counted(rig) == (1, 1)
        rig.close("a/0")
        rig.assert_baseline()


@on_real_engines
def test_T13_a_slice_damaged_twice_fails_its_room_with_the_reason_and_no_other(backend: str) -> None:
    with Rig(backend, 2, 1) as rig:
        rig.begin("a/0", TOKENS, SRC, DST)
        rig.engines[1].flips = 2
        rig.prefill("a/0", 0, TOKENS)
        rig.sample("a/0", b"t")
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "transfer"))
        (end,) = rig.heard(DECODE, "a/0", "transfer")
        assert not end.good and end.payload == b"" and "rank=1" in end.reason
        assert "arrived damaged twice: layers (3, 6) of positions [0, 22)" in end.reason
        assert counted(rig) == (2, 1)
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "release"))
        rig.stop(PREFILL, "a/0")
        rig.pump(lambda: rig.all_heard(PREFILL, "a/0", "release"))
        rig.close("a/0")
        rig.hand_over("b/0", TOKENS, SRC, DST)
        rig.assert_baseline()


@on_real_engines
def test_T13_without_checksums_nobody_notices_so_the_damage_is_real(backend: str) -> None:
    with Rig(backend, 1, 1, checksum="none") as rig:
        rig.engines[0].flips = 1
        with pytest.raises(AssertionError, match="layer"):
            rig.hand_over("a/0", TOKENS, SRC, DST)
        assert all(seen.good for seen in rig.heard(DECODE, "a/0", "transfer")) and counted(rig) == (0, 0)
