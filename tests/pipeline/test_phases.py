"""Phases read from the log of real cores: in order, without gaps, and gone when they were told."""

from __future__ import annotations

from itertools import pairwise

import pytest

from consensus.entry import Key
from consensus.recorder import Record
from pipeline.io.phase_times import intervals, phases
from pipeline.phases import MOST, PhaseBook, Stages
from pipeline.replica import Replica
from tests.pipeline.ring import Instance, Pair
from tests.pipeline.test_retract import crowd


def read(instance: Instance, keys: list[Key]) -> tuple[dict[Key, Stages], dict[Key, Stages], PhaseBook]:
    """Stages at the first token and at the end, as rank 0's shell would tell them."""
    replica: Replica = instance.cores[0].replica
    book, first, ended = PhaseBook(replica.first_state), {}, {}
    for record in instance.cores[0].recorder.records():
        book.apply(record)
        for note in record.notes:
            key = next((key for key in keys if note[1:2] == (key.request,)), None)
            if key is not None and note[0] == "token" and (stages := book.at_first_token(key, record.entry.clock)):
                first[key] = stages
            if key is not None and note[0] == "end":
                ended[key] = book.at_end(key)
    return first, ended, book


@pytest.mark.parametrize("ranks", [1, 3])
def test_both_sides_tell_where_the_time_went(ranks: int) -> None:
    pair = Pair(3, ranks, ranks, prefill={"pages": 24, "max_model_len": 96}, decode={"pages": 24})
    keys = [pair.submit(f"r{i}", prompt=20 + i, out=5) for i in range(6)]
    pair.run()
    first, ended, book = read(pair.prefill, keys)
    for key in keys:
        # Whoever is launched by the entry that admits it has not waited.
        assert [phase for phase, _ in first[key] if phase != "wait"] == ["bootstrap", "forward", "reply"]
        assert [phase for phase, _ in ended[key] if phase != "wait"] == ["bootstrap", "forward", "hand_over", "reply"]
    assert any("wait" in dict(stages) for stages in first.values())
    assert len(book) == 0
    first, ended, book = read(pair.decode, keys)
    for key in keys:
        told = [phase for phase, _ in first[key]]
        assert told[0] == "handshake" and told[-2:] == ["transfer", "reply"]
        assert ended[key][-1][0] == "reply" and "generate" in dict(ended[key])
        assert dict(ended[key])["forward"] < dict(ended[key])["generate"]
        assert all(one[1] <= two[1] for one, two in pairwise(ended[key]))
    assert len(book) == 0


def test_a_first_token_that_ends_the_request_has_its_phases() -> None:
    pair = Pair(1, 1, 1)
    key = pair.submit("r", prompt=9, out=1)
    pair.run()
    first, ended, book = read(pair.decode, [key])
    assert [phase for phase, _ in first[key]][-2:] == ["transfer", "reply"]
    assert ended[key] == first[key]
    assert len(book) == 0


def test_a_cancelled_request_is_forgotten_when_its_end_is_told() -> None:
    pair = Pair(5, 2, 2)
    key = pair.submit("r", prompt=20, out=9)
    pair.run(until=lambda: key in pair.prefill.tokens)
    pair.cancel(key)
    pair.run()
    for instance in (pair.prefill, pair.decode):
        _, ended, book = read(instance, [key])
        assert ended[key] and len(book) == 0


def test_however_often_a_request_is_retracted_its_stages_are_bounded() -> None:
    retracted = 0
    for seed in range(6):
        pair, wanted = crowd(seed, 2)
        pair.run()
        _, ended, book = read(pair.decode, list(wanted))
        retracted += sum("retracted" in dict(stages) for stages in ended.values())
        assert all(len(stages) <= MOST + 1 for stages in ended.values()) and len(book) == 0
    assert retracted > 2, "the test must reach what it is about"


def test_durations_fill_the_time_between_arrival_and_message() -> None:
    stages: Stages = (("bootstrap", 150), ("wait", 150), ("forward", 400), ("wait", 700), ("reply", 900))
    assert list(intervals(100, stages, 1000)) == [
        ("queue", 100, 150),
        ("wait", 150, 400),
        ("forward", 400, 700),
        ("wait", 700, 900),
        ("reply", 900, 1000),
    ]
    told = {phase.name: phase.seconds for phase in phases(100, stages, 1000)}
    assert told == pytest.approx({"queue": 50e-6, "wait": 450e-6, "forward": 300e-6, "reply": 100e-6})
    assert phases(100, (), 1000) == [], "of an attempt that never began nothing is claimed"


def test_a_record_about_nobody_known_is_no_trouble() -> None:
    pair = Pair(1, 1, 1)
    key = pair.submit("r", prompt=9, out=3)
    pair.run()
    records: list[Record] = pair.prefill.cores[0].recorder.records()
    book = PhaseBook("bootstrapping")
    for record in records[len(records) // 2 :]:
        book.apply(record)
    assert book.at_first_token(key, 0) == () and book.at_end(key) == ()
