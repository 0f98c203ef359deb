"""A rank's memory of what it did is bounded, and says what is under way."""

from __future__ import annotations

import msgspec

from consensus.entry import Key
from pipeline.effects import SendDestinations, StartSender, StopRoom
from pipeline.io import control
from pipeline.io.control import LARGEST_FRAME
from pipeline.io.executor import now_us
from pipeline.io.timeline import KEPT, EntryTimes, HandOverTimes, Timeline
from pipeline.io.watch import Watch
from pipeline.local import Observation
from pipeline.planner import Batch, Row
from tests.pipeline.ring import Pair

EVER = 1e9


def batch(tick: int, request: str = "r" * 200) -> Batch:
    return Batch(tick, 0, (Row(Key(request, 0), 16, (1, 2, 3), (0,), None),))


def test_the_oldest_makes_room_and_the_whole_fits_a_control_frame() -> None:
    timeline = Timeline()
    for tick in range(1, 2 * KEPT):
        now = now_us()
        timeline.launched(batch(tick), now)
        timeline.ran(tick, now, now, now)
        timeline.harvested(tick, now)
        timeline.applied(EntryTimes(tick, now, now, 1, 0, tick))
        timeline.handed_over(HandOverTimes("r" * 200 + "/0", now, now, True))
    told = timeline.last(EVER)
    assert [len(told.ticks), len(told.entries), len(told.hand_overs)] == [KEPT] * 3
    assert (told.ticks[0].tick, told.ticks[-1].tick) == (KEPT, 2 * KEPT - 1)
    assert (told.ticks[0].tokens, told.ticks[0].start) == (3, 16)
    # The longest request ids there are: the daemon drops what is larger.
    frame = msgspec.msgpack.encode(control.TimelineReport(1, told))
    assert len(frame) < LARGEST_FRAME


def test_only_the_last_seconds_are_told_but_always_what_is_under_way() -> None:
    timeline = Timeline()
    timeline.launched(batch(1), 1)
    timeline.launched(batch(2), 2)
    timeline.harvested(1, 3)
    timeline.applied(EntryTimes(1, 1, 1, 1, 0, 1))
    told = timeline.last(0.000001)
    assert [times.tick for times in told.ticks] == [2] and told.ticks[0].harvested == 0
    assert told.entries == []
    timeline.ran(1, 1, 2, 3)  # heard of after its harvest
    assert [times.ended for times in timeline.last(EVER).ticks] == [3, 0]
    timeline.ran(99, 1, 1, 1)  # of a tick that nobody launched
    timeline.harvested(99, 1)


def test_the_watch_counts_what_the_log_did() -> None:
    pair = Pair(1, 2, 2)
    for number in range(3):
        pair.submit(f"r{number}", prompt=20, out=4)
    pair.run()
    for core in pair.prefill.cores:
        records = core.recorder.records()
        watch = Watch(core.replica, tells=core.rank == 0)
        for record in records:
            watch.applied(record)
        counted = watch.counters()
        assert counted["entries_applied"] == len(records) == core.cursor.applied
        assert counted["ticks"] == core.replica.slots.next_tick - 1 > 0
        assert counted["ballots_opened"] == counted["verdicts"] > 0


def test_a_push_lasts_from_the_first_layer_written_to_the_proof() -> None:
    watch = Watch(Pair(1, 1, 1).prefill.cores[0].replica, tells=True)
    watch.wrote(batch(1, "early"))  # nobody is waiting for it
    watch.performed(StartSender("r/0", (0,)))
    watch.wrote(batch(2, "r"))
    watch.wrote(batch(2, "r"))
    watch.observed(Observation("r/0", "transfer", True))
    watch.performed(SendDestinations("s/0", (0,)))
    watch.performed(StopRoom("s/0", "client went away"))
    watch.observed(Observation("s/0", "release", True))
    told = watch.timeline(EVER).hand_overs
    assert [(times.room, times.good) for times in told] == [("r/0", True), ("s/0", False)]
    assert watch.counters()["transfer_us"] == sum(times.ended - times.began for times in told)
