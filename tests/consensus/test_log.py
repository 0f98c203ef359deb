"""What a follower accepts, how far rank 0 runs ahead, and what the recorder keeps."""

from __future__ import annotations

import pytest

from consensus.digest import Digest
from consensus.entry import Entry, Trailer
from consensus.log import Cursor, Diverged, Window
from consensus.recorder import Flight, FlightError, Header, Record, Recorder, frame, read, story


def test_a_gap_a_repeat_and_another_state_stop_a_follower() -> None:
    cursor, mine = Cursor(1), b"x" * 16
    cursor.check(Entry(1, 1, 0, 0), Trailer(mine), mine)
    for seq in (0, 2):
        with pytest.raises(Diverged, match=f"expected seq 1, got {seq}"):
            cursor.check(Entry(1, seq, 0, 0), Trailer(mine), mine)
    with pytest.raises(Diverged, match="state differs after seq 0"):
        cursor.check(Entry(1, 1, 0, 0), Trailer(b"y" * 16), mine)


def test_the_window_bounds_what_is_not_acknowledged() -> None:
    window = Window(2)
    window.wrote(1, 10)
    window.wrote(2, 20)
    assert window.full and window.oldest() == (1, 10)
    window.acked(1)
    assert not window.full and window.oldest() == (2, 20)
    window.acked(2)
    assert window.oldest() is None


def test_equal_decisions_give_equal_digests_and_a_difference_stays_visible() -> None:
    a, b = Digest(1), Digest(1)
    a.note("pages", "r", (1, 2))
    b.note("pages", "r", (1, 3))
    a.fold(), b.fold()
    assert a.value != b.value
    a.note("same")
    b.note("same")
    a.fold(), b.fold()
    assert a.value != b.value
    assert Digest(1).value != Digest(2).value


def test_the_recorder_keeps_the_last_entries_and_reads_back_what_it_wrote() -> None:
    recorder = Recorder(limit=3)
    for seq in range(1, 6):
        recorder.record(Entry(1, seq, 0, 0), (("move", "r", 0, "a", "b"),) if seq == 4 else (), b"d%d" % seq)
    records = recorder.records()
    assert [r.entry.seq for r in records] == [3, 4, 5]
    assert len(recorder.fresh()) == 5 and recorder.fresh() == []
    assert story(records, "r") == ["seq 4: ('move', 'r', 0, 'a', 'b')"]
    header = Header("prefill", "p0", 1, 2, b"state")
    data = b"".join(map(frame, (header, *records)))
    assert read(data) == Flight(header, records)
    assert read(data[:-3]).records == records[:-1], "the rank was killed while it wrote the last record"


def test_what_is_not_a_flight_is_refused() -> None:
    header = frame(Header("prefill", "p0", 1, 2, b""))
    gap = b"".join(frame(Record(Entry(1, seq, 0, 0), (), b"")) for seq in (1, 3))
    for data in (b"", b"\xff" * 40, b"\0\0\0\1\xc1", header + gap):
        with pytest.raises(FlightError):
            read(data)
