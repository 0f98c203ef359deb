"""The recorder's files: replayable from either segment, bounded, and pruned."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from consensus import recorder
from decode.scheduler import DecodeReplica
from pipeline.io import flight as flight_module
from pipeline.io.control import RankConfig
from pipeline.io.flight import FlightFiles
from pipeline.replay import replay
from tests.pipeline.ring import Pair


def config_for(folder: Path, epoch: int = 1) -> RankConfig:
    values = {field.name: "" for field in msgspec.structs.fields(RankConfig)}
    known = {"role": "decode", "instance": "D", "epoch": epoch, "rank": 0, "dump_dir": str(folder)}
    return RankConfig(**values | known)


def test_a_dump_joins_the_segments_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "SEGMENT", 15)
    pair = Pair(11, 1, 2)
    files = FlightFiles(config_for(tmp_path), pair.decode.cores[0])
    for i in range(8):
        pair.submit(f"r{i}", prompt=3 + i, out=4)
        pair.run()
        files.write()
    path = files.dump("why not")
    flight = recorder.read(path.read_bytes())
    applied = pair.decode.cores[0].cursor.applied
    assert flight.header.reason == "why not" and flight.records[-1].entry.seq == applied
    assert 15 <= len(flight.records) < applied, "bounded by two segments, and the test went beyond"
    assert all(step.same for step in replay(flight, DecodeReplica))
    assert recorder.story(flight.records, "r7")


def test_recordings_of_old_epochs_are_deleted_and_others_stay(tmp_path: Path) -> None:
    for name in ("D-e1-r0.dump", "D-e2-r0.a.flight", "D-e1-r1.dump", "E-e1-r0.dump", "D-e9-r0.dump", "D-ex-r0.dump"):
        (tmp_path / name).write_bytes(b"x")
    FlightFiles(config_for(tmp_path, epoch=10), Pair(1, 1, 1).decode.cores[0])
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["D-e1-r1.dump", "D-e10-r0.a.flight", "D-e9-r0.dump", "D-ex-r0.dump", "E-e1-r0.dump"]


def test_a_full_disk_pauses_the_recording_and_not_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "SEGMENT", 15)
    pair = Pair(11, 1, 1)
    files = FlightFiles(config_for(tmp_path), pair.decode.cores[0])
    assert files._file is not None
    files._file.close()
    files._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    for i in range(4):
        pair.submit(f"r{i}", prompt=3, out=4)
        pair.run()
        files.write()
    assert files.lost_segments == 1, "the next segment was written again"
    assert recorder.read(files.dump("later").read_bytes()).records
