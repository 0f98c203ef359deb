"""Silence counts only while somebody waits."""

from __future__ import annotations

from transfer.liveness import Liveness


def test_an_idle_peer_is_neither_pinged_nor_lost() -> None:
    live = Liveness(2.0, 10.0, heard_at=0.0)
    live.watch(100.0, wanted=False)
    assert not live.ping_due(100.0) and not live.lost(100.0)


def test_silence_starts_when_something_opens_and_pings_come_once_per_interval() -> None:
    live = Liveness(2.0, 10.0, heard_at=0.0)
    live.watch(100.0, wanted=True)
    assert live.ping_due(100.0) and not live.ping_due(101.0) and live.ping_due(102.0)
    assert not live.lost(109.9) and live.lost(110.0)


def test_any_word_ends_the_silence() -> None:
    live = Liveness(2.0, 10.0, heard_at=0.0)
    live.watch(0.0, wanted=True)
    live.heard(9.0)
    assert not live.lost(18.9) and not live.ping_due(10.9) and live.lost(19.0)


def test_what_was_closed_and_opened_again_waits_anew() -> None:
    live = Liveness(2.0, 10.0, heard_at=0.0)
    live.watch(0.0, wanted=True)
    live.watch(9.0, wanted=False)
    live.watch(12.0, wanted=True)
    assert not live.lost(21.0)
