"""PPConsensusStore: the conclusion is the minimum, terminal views absorb, tombstones hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consensus.status import KVPoll, conclude
from consensus.store import Leader, Reporter, Update, UpdateLost

W, F, B = KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED, KVPoll.BOOTSTRAPPING


def told(leader: Leader, update: Update | None) -> tuple[KVPoll, str] | None:
    assert update is not None
    return leader.apply(update)


def test_a_missing_report_counts_as_bootstrapping() -> None:
    assert conclude([W, None, KVPoll.SUCCESS]) is B
    assert conclude([W, F, None]) is F
    assert conclude([W, KVPoll.SUCCESS]) is W


def test_rank_0_is_told_once_when_the_last_rank_is_ready() -> None:
    leader, ranks = Leader(3), [Reporter(k) for k in range(3)]
    assert told(leader, ranks[2].put("r", W)) is None
    assert told(leader, ranks[0].put("r", W)) is None
    assert told(leader, ranks[1].put("r", W)) == (W, "")
    assert ranks[1].put("r", W) is None, "nothing changed, nothing to send"


def test_one_failure_decides_and_can_never_be_taken_back() -> None:
    leader, ranks = Leader(2), [Reporter(k) for k in range(2)]
    assert told(leader, ranks[1].put("r", F, "refused")) == (F, "rank 1: refused")
    assert ranks[1].put("r", W) is None
    # Even if a faulty rank says so on the wire:
    assert leader.apply(Update(1, 2, "r", W)) is None
    assert told(leader, ranks[0].put("r", W)) is None


def test_a_late_report_does_not_resurrect_a_room() -> None:
    leader, ranks = Leader(2), [Reporter(k) for k in range(2)]
    late = ranks[1].put("r", W)
    assert told(leader, ranks[0].put("r", W)) is None
    assert told(leader, ranks[0].delete("r")) is None
    assert told(leader, late) is None
    assert len(leader) == 1, "the tombstone stays until rank 1 has deleted too"
    told(leader, ranks[1].delete("r"))
    assert len(leader) == 0 and not any(map(len, ranks))


def test_a_hole_in_a_ranks_updates_is_an_error_and_a_repeat_is_not() -> None:
    leader = Leader(2)
    leader.apply(Update(1, 1, "a", W))
    assert leader.apply(Update(1, 1, "a", F)) is None
    with pytest.raises(UpdateLost, match="rank 1: store update 2"):
        leader.apply(Update(1, 3, "a", W))


@given(st.lists(st.sampled_from(KVPoll), max_size=8))
def test_a_view_never_goes_back_and_a_terminal_one_never_changes(reports: list[KVPoll]) -> None:
    view = B
    for report in reports:
        new = view.then(report)
        assert new is view if view.terminal else new is F or new >= view
        view = new
