"""Decode under a pool that is too small: the youngest makes room, and nobody's tokens change (D1, D2, D3)."""

from __future__ import annotations

from random import Random

import pytest

from consensus.entry import Key, PeerRef, RequestSpec, SamplingParams
from decode.retract import GrowthShare
from pipeline.request import Request
from tests.pipeline.ring import Pair, token_of

SMALL = {"pages": 8, "page_size": 4, "max_model_len": 32}


def crowd(seed: int, ranks: int) -> tuple[Pair, dict[Key, tuple[int, int]]]:
    """More than the pool can hold at once, each of which fits alone."""
    pair = Pair(seed, 1, ranks, prefill={"pages": 40}, decode=SMALL)
    return pair, {pair.submit(f"r{i}", prompt=5 + i, out=18 - i): (5 + i, 18 - i) for i in range(6)}


def check(pair: Pair, wanted: dict[Key, tuple[int, int]]) -> None:
    for key, (prompt, out) in wanted.items():
        assert [o.kind for o in pair.decode.ends[key]] == ["length"], pair.decode.ends[key]
        assert pair.decode.tokens[key] == [token_of(key.request, prompt + i).token for i in range(out)]
    pair.assert_clean()


def test_all_finish_with_the_reference_tokens() -> None:
    retracted = 0
    for seed in range(30):
        pair, wanted = crowd(seed, 1 + seed % 3)
        pair.run()
        counters = pair.decode.cores[0].replica.counters
        assert counters["retracted"] == counters["resumed"]
        retracted += counters["retracted"]
        check(pair, wanted)
    assert retracted > 20, "the test must reach what it is about"


def test_the_oldest_is_never_a_victim() -> None:
    pair, wanted = crowd(3, 2)
    pair.run()
    oldest = next(iter(wanted)).request
    moves = [n for r in pair.decode.cores[0].recorder.records() for n in r.notes if n[0] == "move"]
    assert any(n[4] == "spilling" for n in moves)
    assert not any(n[1] == oldest and n[4] == "spilling" for n in moves)


@pytest.mark.parametrize("state", ["spilling", "retracted", "filling"])
def test_an_abort_in_each_state_leaves_nothing(state: str) -> None:
    reached = 0
    for seed in range(30):
        pair, wanted = crowd(seed, 1 + seed % 3)
        members = pair.decode.cores[0].replica.states[state]
        pair.run(until=lambda members=members: len(members) > 0)
        for key in list(members)[:1]:
            reached += 1
            pair.cancel(key)
            wanted.pop(key)
        pair.run()
        check(pair, wanted)
    assert reached > 15


def test_host_memory_full_is_one_clean_retryable_error() -> None:
    reached = 0
    for seed in range(15):
        pair, wanted = crowd(seed, 2)
        pair.host_full.update(key.room for key in wanted)
        pair.run()
        failed = [key for key in wanted if pair.decode.ends[key][0].kind == "error"]
        for key in failed:
            (outcome,) = pair.decode.ends[key]
            assert outcome.retryable and "host memory is full" in outcome.reason
        reached += len(failed)
        check(pair, {key: want for key, want in wanted.items() if key not in failed})
    assert reached > 10


def request_of(number: int, tokens: int) -> Request:
    spec = RequestSpec(Key(f"r{number}", 0), (1,) * 5, SamplingParams(tokens), PeerRef("prefill-0", "", 1), 1)
    return Request(spec, "ready", 0, 1, number, 1000)


def test_what_all_are_expected_to_grow_by_is_about_the_sum_of_each_ones_pages() -> None:
    chance = Random(5)
    for _ in range(200):
        share, page_size = GrowthShare(), chance.choice((1, 16, 64))
        share.permille = chance.randrange(100, 1001)
        *members, newest = [request_of(number, chance.randrange(1, 500)) for number in range(chance.randrange(2, 40))]
        for member in members:
            share.enter(member)
        for member in chance.sample(members, len(members) // 2):
            for token in range(chance.randrange(member.left)):
                member.output.append(token)
                share.grew()
        gone = members.pop()
        share.leave(gone)
        each = [-(-request.left * share.permille // (1000 * page_size)) for request in (*members, newest)]
        expected = share.expected_with(newest, page_size)
        if members:
            assert abs(expected - sum(each)) <= len(each) / 2 + 1
        else:
            assert expected == 0, "alone it has all the pool"


def test_a_sum_of_growth_that_is_wrong_is_found() -> None:
    pair, _ = crowd(3, 1)
    replica = pair.decode.cores[0].replica
    pair.run(until=lambda: len(replica.states["running"]) > 0)
    replica.audit()
    next(iter(replica.states["running"].values())).output.append(1)
    with pytest.raises(AssertionError, match="growth is kept for"):
        replica.audit()
