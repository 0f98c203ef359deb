"""The core under random schedules: every request ends once, ranks agree, tokens are the reference's."""

from __future__ import annotations

import pytest

from consensus.entry import Key
from consensus.log import Diverged
from consensus.progress import Progress
from pipeline.lease import REQUEST
from pipeline.planner import Row
from tests.pipeline.ring import Pair, token_of

ROOM = {"pages": 32, "max_model_len": 128}


def reference(key: Key, prompt: int, out: int) -> list[int]:
    return [token_of(key.request, prompt + i).token for i in range(out)]


@pytest.mark.parametrize("seed", range(40))
def test_requests_run_through_both_sides_and_leave_nothing(seed: int) -> None:
    pair = Pair(seed, 1 + seed % 4, 1 + seed // 4 % 4)
    wanted = {
        pair.submit(f"r{i}", prompt=1 + (7 * i) % 25, out=1 + i % 9): (1 + (7 * i) % 25, 1 + i % 9) for i in range(12)
    }
    pair.run()
    for key, (prompt, out) in wanted.items():
        assert pair.decode.tokens[key] == reference(key, prompt, out)
        assert pair.prefill.tokens[key] == reference(key, prompt, 1)
        assert [o.kind for o in pair.decode.ends[key]] == ["length"]
        assert [o.kind for o in pair.prefill.ends[key]] == ["length" if out == 1 else "handed_over"]
    pair.assert_clean()


@pytest.mark.parametrize("seed", range(12))
def test_resumed_tokens_are_prompt_to_the_pages_and_output_to_the_count(seed: int) -> None:
    """A pool that holds prompt and output exactly: were resumed tokens counted twice, it would refuse."""
    pair = Pair(seed, 1 + seed % 3, 1 + seed // 3 % 3, decode={"pages": 9})
    wanted = {pair.submit(f"r{n}", prompt=12 + n, out=24 - n, resumed=n): (12 + n, 24 - n) for n in (1, 5, 22, 23)}
    pair.run()
    for key, (prompt, out) in wanted.items():
        assert pair.decode.tokens[key] == reference(key, prompt, out)
        assert pair.prefill.tokens[key] == reference(key, prompt, 1)
        (outcome,) = pair.decode.ends[key]
        assert (outcome.kind, outcome.output_tokens) == ("length", 24)
        assert [o.output_tokens for o in pair.prefill.ends[key]] == [prompt - 12 + 1]
    pair.assert_clean()


def test_decode_computes_no_prompt_token() -> None:
    pair = Pair(1, 2, 2)
    pair.submit("r", prompt=20, out=5)
    pair.run()
    assert all(row.start >= 20 and len(row.tokens) == 1 for row in pair.decode.rows)
    assert pair.decode.cores[0].replica.counters["prompt_tokens_computed"] == 0
    assert sum(len(row.tokens) for row in pair.prefill.rows) == 20


def test_chunks_of_a_long_prompt_occupy_consecutive_slots_at_once() -> None:
    pair = Pair(1, 4, 1, prefill={"pages": 16, "max_model_len": 64})
    pair.submit("long", prompt=40, out=1)
    slots = pair.prefill.cores[0].replica.slots
    pair.run(until=lambda: slots.in_flight == 5)  # 5 chunks of 8 in 4 + 1 slots, before any of them returned
    assert slots.in_flight == 5 and not pair.prefill.tokens


@pytest.mark.parametrize("seed", range(60))
def test_aborts_at_any_moment_leave_nothing(seed: int) -> None:
    pair = Pair(seed, 1 + seed % 3, 1 + seed // 3 % 3)
    keys = [pair.submit(f"r{i}", prompt=1 + (5 * i) % 25, out=2 + i % 7) for i in range(12)]
    for key in keys[::2]:
        stop = pair.random.randrange(1, 1500)
        pair.run(until=lambda stop=stop, start=pair.clock: pair.clock > start + stop)
        pair.cancel(key)
    pair.run()
    for inst in (pair.prefill, pair.decode):
        assert set(inst.ends) == set(keys)
    for i, key in enumerate(keys):
        told = pair.decode.tokens.get(key, [])
        assert told == reference(key, 1 + (5 * i) % 25, 2 + i % 7)[: len(told)]
        assert key in keys[::2] or pair.decode.ends[key][0].kind == "length"
    pair.assert_clean()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_G1_after_its_abort_no_chunk_of_a_prompt_is_launched_and_no_rank_begins_one(ranks: int) -> None:
    """Given a long prompt with a chunk in every slot, none of which has been begun, when it is cancelled, then none
    of its tokens is computed on any rank, and the next prompt is first in line."""
    pair = Pair(1, ranks, 1, prefill=ROOM, decode=ROOM)
    long = pair.submit("long", prompt=96, out=1)
    inst, slots = pair.prefill, pair.prefill.cores[0].replica.slots
    pair.held = True  # executors do nothing
    pair.run(until=lambda: slots.in_flight == ranks + 1)
    launched = inst.cores[0].replica.counters["prompt_tokens_computed"]
    pair.cancel(long)
    short = pair.submit("short", prompt=4, out=1)
    pair.run()
    assert slots.in_flight == ranks + 1, "every chunk waits"
    pair.held = False
    pair.run()
    assert inst.cores[0].replica.counters["prompt_tokens_computed"] == launched + 4, "no chunk of it was launched"
    assert inst.rows and all(row.key == short for row in inst.rows), "no chunk of it was computed"
    assert inst.skipped == ranks * (ranks + 1)
    assert [outcome.kind for outcome in inst.ends[long]] == ["abort"]
    assert [outcome.kind for outcome in inst.ends[short]] == ["length"]
    pair.assert_clean()


def test_G1_at_most_the_begun_chunk_of_a_cancelled_prompt_is_computed() -> None:
    """At whatever moment a prompt is cancelled: what rank 0 has not begun when it knows is never computed, unless
    another prompt shares the tick, and what shares it is answered as ever."""
    runs = [_cancel_at_random(seed) for seed in range(30)]
    assert sum(cancelled for cancelled, _ in runs) > 3 < sum(skipped for _, skipped in runs), "badly chosen moments"


def _cancel_at_random(seed: int) -> tuple[bool, int]:
    """Whether it was in the middle of the prompt, and how many ticks were skipped."""
    pair = Pair(seed, 1 + seed % 4, 1, prefill=ROOM, decode=ROOM)
    inst, replica, moment = pair.prefill, pair.prefill.cores[0].replica, 20 + pair.random.randrange(6000)
    long = pair.submit("long", prompt=90, out=1)
    others = {pair.submit(f"r{i}", prompt=3 + i, out=1): 3 + i for i in range(6)}
    pair.run(until=lambda: pair.clock > moment)
    pair.cancel(long)
    pair.run(until=lambda: long in inst.ends or replica.requests[long].ending is not None)
    begun = _alone(inst.rows, long)
    pair.run()
    assert _alone(inst.rows, long) == begun
    for key, prompt in others.items():
        assert [outcome.kind for outcome in inst.ends[key]] == ["length"]
        assert inst.tokens[key] == reference(key, prompt, 1)
    pair.assert_clean()
    return bool(begun) and inst.ends[long][0].kind == "abort", inst.skipped


def _alone(rows: list[Row], key: Key) -> int:
    """Full chunks of the attempt: those that shared their tick with nobody."""
    return sum(row.key == key and len(row.tokens) == 8 for row in rows)


def test_abort_of_unknown_finished_and_similar_ids_is_a_no_op() -> None:
    pair = Pair(3, 2, 2)
    key = pair.submit("a10", prompt=5, out=4)
    for other in ("a1", "a", "a100", ""):
        pair.cancel(Key(other, 0))
        pair.cancel(Key("a10", 1))
    pair.run()
    assert pair.decode.ends[key][0].kind == "length"
    pair.cancel(key)
    pair.run()
    assert len(pair.decode.ends[key]) == 1
    pair.assert_clean()


def test_a_deadline_ends_a_request_whose_peer_never_answers() -> None:
    pair = Pair(5, 2, 2)
    pair.silent.add("mute/0")
    key = pair.submit("mute", prompt=5, out=4, timeout=50_000_000)
    other = pair.submit("ok", prompt=5, out=4)
    pair.run()
    pair.clock += 60_000_000
    pair.run()
    for inst in (pair.prefill, pair.decode):
        assert inst.ends[key][0].kind == "error" and "timed out while" in inst.ends[key][0].reason
    assert pair.decode.ends[other][0].kind == "length"
    pair.assert_clean()


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    pair = Pair(6, 2, 2, decode={"pages": 4})
    key = pair.submit("big", prompt=12, out=20)
    pair.run(until=lambda: key in pair.decode.ends)
    assert "need 8 pages, the pool has 4" in pair.decode.ends[key][0].reason


def test_a_tick_that_does_not_come_back_is_named_with_its_rank() -> None:
    pair = Pair(9, 3, 1)
    pair.submit("r", prompt=5, out=2)
    sequencer = pair.prefill.sequencer
    assert sequencer.stalled(pair.clock) == (0.0, "")
    pair.run(until=lambda: sequencer.core.replica.slots.in_flight == 1)
    for rank, tick in ((0, 0), (1, 1), (2, 0)):  # rank 1's executor is in it, rank 2's waits for work
        sequencer.note_progress(Progress(rank, 7, tick, 1, 6.5))
    seconds, doing = sequencer.stalled(pair.clock + 7_000_000)
    assert 7 <= seconds < 7.1
    assert "tick 1 (1 rows) has not returned for 7.0 s; rank 1 has been in it for 6.5 s" in doing
    pair.run()
    assert sequencer.stalled(pair.clock + 7_000_000) == (0.0, "")


def test_a_rank_that_decides_differently_is_caught_at_the_next_entry() -> None:
    pair = Pair(7, 1, 3)
    pair.submit("r", prompt=9, out=6)
    pair.checks = False
    pair.decode.cores[1].replica.leases.open(Key("ghost", 0), 1, REQUEST)  # rank 1 now gives out other pages
    with pytest.raises(Diverged, match="state differs after seq"):
        pair.run()
