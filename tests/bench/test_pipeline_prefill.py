"""The ideal of a pipeline, and what ranks tell of a prompt's chunks, from times made up and known."""

from __future__ import annotations

import pytest

from bench.pipeline_prefill import Passage, Round, forwards_of, makespan, told
from bench.timelines import RankTimes
from paceline_proto.v1 import timeline_pb2


def rank(number: int, *forwards: tuple[int, int], first: int = 1) -> RankTimes:
    ticks = [
        timeline_pb2.TickTimes(tick=first + i, launched_us=1, began_us=1, fed_us=fed, ended_us=ended, harvested_us=9_000_000)
        for i, (fed, ended) in enumerate(forwards)
    ]  # fmt: skip
    return RankTimes("prefill-0", "prefill", number, ticks, [], False)


def test_equal_forwards_take_as_many_steps_as_chunks_and_further_ranks() -> None:
    assert makespan([[3.0] * 8] * 16) == 3.0 * (16 + 7)
    assert makespan([[3.0]] * 4) == 12.0


def test_a_chunk_waits_for_the_rank_and_the_chunk_before() -> None:
    # The first rank ends at 1, 3, 6; the second begins at 1, 4 (it is busy until then), 6.
    assert makespan([[1.0, 3.0], [2.0, 1.0], [3.0, 2.0]]) == 8.0


def test_forwards_are_told_by_chunk_and_rank() -> None:
    ranks = [rank(0, (0, 1_000_000), (1_000_000, 3_000_000)), rank(1, (1_500_000, 2_000_000), (3_000_000, 3_250_000))]
    assert forwards_of(ranks) == [[1.0, 0.5], [2.0, 0.25]]
    with pytest.raises(ValueError, match="different microbatches"):
        forwards_of([ranks[0], rank(1, (0, 1), (1, 2), first=2)])


def test_what_was_reached_is_told_beside_what_could_be() -> None:
    one = Passage(4.0, 4.0, [[2.0], [2.0]], 5.0, 0.5)
    two = Passage(4.0, 3.75, [[1.0, 1.0], [1.0, 1.0]], 6.0, 0.25)
    (each,) = rounds = [Round(one, two)]
    assert (each.ideal, each.of_ideal, each.of_undisturbed) == (3.0, 0.75, 0.75)
    assert (each.dearer, each.balance) == (1.0, 1.0)
    lines = told(rounds)
    assert any("reached" in line and line.endswith("0.750") for line in lines)
    assert any("CPU time" in line and line.endswith("1.200") for line in lines)
    assert any("processor" in line and line.endswith("0.500 s, 0.250 s") for line in lines)
    assert any("alone, without gateway" in line and line.endswith("0.800") for line in lines)
