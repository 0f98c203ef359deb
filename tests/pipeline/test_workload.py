"""What an instance says of its load: what is queued, how fast it gets on."""

from __future__ import annotations

import pytest

from pipeline.workload import Speed, Workload
from tests.pipeline.ring import Pair


def test_what_is_queued_falls_from_all_prompts_to_nothing() -> None:
    pair = Pair(1, 2, 2)
    keys = [pair.submit(f"r{i}", prompt=20, out=3) for i in range(3)]
    prefill, decode = (instance.cores[0].replica for instance in (pair.prefill, pair.decode))
    seen: list[Workload] = []

    def look() -> bool:
        seen.append(prefill.workload())
        assert decode.workload().queued_tokens == 0
        return False

    pair.run(until=look)
    all_known = [one for one in seen if one.requests == len(keys)]
    assert len({one.queued_tokens for one in all_known}) > 3
    assert {one.queued_tokens + one.computed for one in all_known} == {60}
    assert prefill.workload() == Workload(free_pages=12, computed=60)
    assert decode.workload() == Workload(free_pages=12)


def test_speed_is_measured_only_while_there_is_work() -> None:
    speed = Speed()
    speed.note(0.0, Workload(queued_tokens=0, computed=0))
    speed.note(1.0, Workload(queued_tokens=500, computed=100))
    assert speed.per_second == 0.0, "when in that second the work came is not known"
    speed.note(2.0, Workload(queued_tokens=300, computed=300))
    assert speed.per_second == pytest.approx(200)
    speed.note(3.0, Workload(queued_tokens=0, computed=310))
    speed.note(50.0, Workload(queued_tokens=0, computed=310))
    assert speed.per_second == pytest.approx(200), "an idle instance is not a slow one"


def test_a_speed_of_bad_times_does_not_outlive_them() -> None:
    speed = Speed()
    for second in range(300):  # decode took nothing for minutes
        speed.note(float(second), Workload(queued_tokens=500, computed=100 if second else 0))
    slow = speed.per_second
    assert 0.0 < slow < 1.0
    # Given that whoever is in a hurry is turned away, when a prompt shorter than a reading gets through, it counts;
    speed.note(300.0, Workload(queued_tokens=0, computed=100))
    speed.note(301.0, Workload(queued_tokens=0, computed=400))
    assert speed.per_second == pytest.approx(300)
    # when none gets through, the speed is soon not known any more, and the next one is let in.
    speed.note(359.0, Workload(queued_tokens=0, computed=400))
    assert speed.per_second
    speed.note(360.0, Workload(queued_tokens=0, computed=400))
    assert speed.per_second == 0.0


def test_speed_follows_what_it_has_become() -> None:
    speed, computed = Speed(), 0
    for second in range(200):
        computed += 1000 if second < 100 else 100
        speed.note(float(second), Workload(queued_tokens=1, computed=computed))
        if second == 99:
            assert speed.per_second == pytest.approx(1000)
    assert speed.per_second == pytest.approx(100, rel=0.1)


def test_new_ranks_that_count_anew_are_no_negative_speed() -> None:
    speed = Speed()
    for now, computed in ((0.0, 1000), (1.0, 2000), (2.0, 0), (3.0, 900)):
        speed.note(now, Workload(queued_tokens=1, computed=computed))
        assert speed.per_second >= 0
    assert 900 < speed.per_second <= 1000
