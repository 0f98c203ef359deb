"""Which instance a policy takes, and what that does to waiting: requests over unequal instances in virtual time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace
from statistics import mean

import pytest

from gateway.instances import Fleet, Instance, Pair, Side
from gateway.policies import (
    POLICIES,
    BySession,
    Cost,
    LeastWork,
    Load,
    Placing,
    Policy,
    PowerOfTwo,
    RoundRobin,
    policy_named,
)
from gateway.router import NoPair, Router
from gateway.workbook import Entry, Report
from tests.gateway.test_router import instance

P = [replace(instance(Side.PREFILL, f"p{i}"), pages=0, max_model_len=0) for i in range(8)]
D = replace(instance(Side.DECODE, "d"), pages=0, max_model_len=0)
SOME = Placing(Cost(100, 10))


def loads(*told: Load) -> dict[str, Load]:
    return {one.dialed: load for one, load in zip(P, told, strict=False)}


class Drawn:
    """Chance, as it was."""

    def __init__(self, *numbers: int) -> None:
        self._left = list(numbers)

    def __call__(self, below: int) -> int:
        assert 0 <= self._left[0] < below
        return self._left.pop(0)


# -- each policy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        ([Load(500), Load(400)], 1),
        ([Load(500, rate=100.0), Load(400, rate=10.0)], 0),
        ([Load(500, rate=100.0), Load(400)], 1),  # one rate is not known: tokens are compared
        ([Load(0, rate=10.0), Load(1000, rate=1000.0)], 1),  # 1.1 s with this prompt, against 10 s
        ([Load(500, requests=3), Load(501, requests=1)], 1),  # as good as equal: the fewer requests
        ([Load(500, last_chosen=2), Load(500, last_chosen=1)], 1),
    ],
)
def test_least_work_is_where_it_would_be_done_first(told: list[Load], taken: int) -> None:
    assert LeastWork().choose(P[:2], loads(*told), SOME) is P[taken]


def test_of_two_that_chance_names_the_one_with_less_work_is_taken() -> None:
    told = {one.dialed: Load(10_000 - 1_000 * at) for at, one in enumerate(P)}
    for first in range(8):
        for second in range(7):
            pair = {first, (first + 1 + second) % 8}
            assert len(pair) == 2, "never the same one twice"
            assert PowerOfTwo(Drawn(first, second)).choose(P, told, SOME) is P[max(pair)]


def test_a_session_stays_and_only_those_of_a_lost_instance_move() -> None:
    policy, sessions = BySession(), [f"s{i}" for i in range(400)]
    before = {s: policy.choose(P, {}, replace(SOME, session=s)).instance_id for s in sessions}
    assert before == {s: BySession().choose(P[::-1], {}, replace(SOME, session=s)).instance_id for s in sessions}
    counts = [list(before.values()).count(one.instance_id) for one in P]
    assert min(counts) > 25, "no instance is left out"
    after = {s: policy.choose(P[1:], {}, replace(SOME, session=s)).instance_id for s in sessions}
    assert {s for s in sessions if before[s] != after[s]} == {s for s in sessions if before[s] == "p0"}


def test_a_restart_under_another_address_and_epoch_keeps_its_sessions() -> None:
    moved = [replace(one, dialed=f"10.0.0.{at}:1", epoch=9) for at, one in enumerate(P)]
    for session in map(str, range(50)):
        placing = replace(SOME, session=session)
        assert BySession().choose(P, {}, placing).instance_id == BySession().choose(moved, {}, placing).instance_id


def test_the_place_of_a_session_is_the_same_in_every_release() -> None:
    placed = [BySession().choose(P, {}, replace(SOME, session=s)).instance_id for s in ("a", "b", "c", "Grüße")]
    assert placed == ["p3", "p4", "p2", "p6"]


def test_without_a_session_the_least_work_decides() -> None:
    assert BySession().choose(P[:2], loads(Load(9), Load(8)), SOME) is LeastWork().choose(
        P[:2], loads(Load(9), Load(8)), SOME
    )


def test_round_robin_takes_the_longest_not_chosen() -> None:
    told = loads(Load(0, last_chosen=3), Load(9_999, last_chosen=1), Load(0, last_chosen=2))
    assert RoundRobin().choose(P[:3], told, SOME) is P[1]


@pytest.mark.parametrize("name", POLICIES)
def test_one_candidate_is_taken_by_every_policy(name: str) -> None:
    policy = policy_named(name, random.Random(1).randrange)
    assert policy.choose([P[0]], {}, replace(SOME, session="s")) is P[0]


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="there is no policy 'luck'; there are least-work, power-of-two"):
        policy_named("luck", lambda n: 0)


# -- what they do to waiting ---------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Computes prompts one after the other."""

    speed: float  # tokens per second
    busy_until: float = 0.0
    queue: list[tuple[float, int]] = field(default_factory=list)  # when done, tokens

    def take(self, now: float, tokens: int) -> float:
        self.busy_until = max(self.busy_until, now) + tokens / self.speed
        self.queue.append((self.busy_until, tokens))
        return self.busy_until

    def queued(self, now: float) -> int:
        self.queue = [(done, tokens) for done, tokens in self.queue if done > now]
        left = sum(tokens for _, tokens in self.queue)
        return left - int(self.queue[0][1] * (1 - min((self.queue[0][0] - now) * self.speed / self.queue[0][1], 1))) \
            if self.queue else 0  # fmt: skip


def mean_wait(policies: list[Policy], speeds: list[float], seed: int = 1, requests: int = 1000) -> float:
    """Seconds to the first token of requests that come through gateways (one per policy) which know what instances
    told them at the last full second, and what they themselves have sent since."""
    chance = random.Random(seed)
    machines = {one.dialed: Machine(speed) for one, speed in zip(P, speeds, strict=False)}
    fleet = Fleet(tuple(P[: len(speeds)]), (D,))
    gateways = [Router(policy) for policy in policies]
    ends: list[tuple[float, int, Router, list[Entry]]] = []
    now, told_at, waits = 0.0, 0.0, []
    for number in range(requests):
        now += chance.expovariate(1.0) * 500 / (0.8 * sum(speeds))  # four fifths of what all could do
        while told_at <= now:
            for router in gateways:
                for one in fleet.prefills:
                    machine = machines[one.dialed]
                    router.reported(one, Report(machine.queued(told_at), 0, len(machine.queue), machine.speed))
            told_at += 1.0
        while ends and ends[0][0] <= now:
            _, _, router, entries = heapq.heappop(ends)
            for entry in entries:
                router.ended(entry)
        placing = Placing(Cost(max(int(chance.expovariate(1 / 500)), 1), 10), session=str(chance.randrange(40)))
        router = gateways[number % len(gateways)]
        pair = router.choose(fleet, placing, now)
        assert isinstance(pair, Pair)
        done = machines[pair.prefill.dialed].take(now, placing.cost.prompt)
        heapq.heappush(ends, (done, number, router, list(router.started(pair, placing, now).values())))
        waits.append(done - now)
    return mean(waits)


UNEQUAL = [2000.0, 1000.0, 500.0, 250.0]


def test_over_unequal_instances_least_work_waits_far_less_than_round_robin() -> None:
    for seed in range(2):
        least, turns = mean_wait([LeastWork()], UNEQUAL, seed), mean_wait([RoundRobin()], UNEQUAL, seed)
        two = mean_wait([PowerOfTwo(random.Random(seed).randrange)], UNEQUAL, seed)
        assert least < two < turns
        assert least < turns / 4


def test_over_equal_instances_nothing_is_lost_by_it() -> None:
    equal = [1000.0] * 4
    assert mean_wait([LeastWork()], equal) < mean_wait([RoundRobin()], equal)


def test_three_gateways_that_know_each_other_only_by_reports_still_gain() -> None:
    least = mean_wait([LeastWork() for _ in range(3)], UNEQUAL)
    assert least < mean_wait([RoundRobin() for _ in range(3)], UNEQUAL) / 3


# -- by when ---------------------------------------------------------------------------------------------------------


def told_router(*queued: int, rate: float = 100.0) -> tuple[Router, Fleet]:
    router, fleet = Router(RoundRobin()), Fleet(tuple(P[: len(queued)]), (D,))
    for one, tokens in zip(P, queued, strict=False):
        router.reported(one, Report(tokens, prefill_rate=rate))
    return router, fleet


def test_a_request_goes_where_it_is_answered_in_time_whatever_the_policy_likes() -> None:
    router, fleet = told_router(5000, 300)
    for _ in range(3):
        pair = router.choose(fleet, SOME, 0.0, patience_s=10.0)
        assert isinstance(pair, Pair) and pair.prefill is P[1]


def test_a_request_that_nobody_answers_in_time_is_told_how_much_too_late() -> None:
    router, fleet = told_router(5000, 2900)
    refused = router.choose(fleet, SOME, 0.0, patience_s=10.0)
    assert isinstance(refused, NoPair)
    assert refused.late_s == pytest.approx(20.0)
    assert refused.reason == "the first token is expected in 30.0 s, but the request has only 10.0 s"


def test_while_no_speed_is_known_nobody_is_turned_away() -> None:
    router, fleet = told_router(50_000, rate=0.0)
    assert isinstance(router.choose(fleet, SOME, 0.0, patience_s=1.0), Pair)


def all_of(one: Instance, router: Router) -> tuple[int, int]:
    load = router.load_of(one)
    return load.tokens, load.requests


def test_reports_and_ones_own_book_are_one_estimate() -> None:
    router, fleet = told_router(0)

    def start() -> list[Entry]:
        pair = router.choose(fleet, SOME, 0.0)
        assert isinstance(pair, Pair)
        return list(router.started(pair, SOME, 0.0).values())

    first, second = start(), start()
    assert all_of(P[0], router) == (200, 2), "the instance has not told of them yet"
    router.reported(P[0], Report(0, requests=0, prefill_rate=100.0))
    assert all_of(P[0], router) == (200, 2), "one report may be too early to know of them"
    router.reported(P[0], Report(130, requests=2, prefill_rate=100.0))
    assert all_of(P[0], router) == (130, 2), "the next one knows"
    for entry in first:
        router.ended(entry)
    assert all_of(P[0], router) == (30, 1)
    router.reported(P[0], Report(30_030, requests=9, prefill_rate=100.0))
    assert all_of(P[0], router) == (30_030, 9), "the rest is work of other gateways"
    for entry in second:
        router.ended(entry)
    router.reported(P[0], Report(0, requests=0, prefill_rate=100.0))
    assert all_of(P[0], router) == (0, 0)


def test_decode_is_as_loaded_as_its_pool_is_full() -> None:
    small, large = replace(D, pages=100), replace(D, pages=1000, instance_id="large", dialed="large:1")
    router, fleet = Router(), Fleet((P[0],), (small, large))
    router.reported(small, Report(free_pages=50))
    router.reported(large, Report(free_pages=800))
    assert router.load_of(large) == Load(200 * 16, 0, 16_000.0, 0)
    pair = router.choose(fleet, SOME, 0.0)
    assert isinstance(pair, Pair) and pair.decode is large, "more tokens, but a smaller share"


def test_what_has_gone_is_forgotten_once_nothing_of_it_is_outstanding() -> None:
    router, fleet = told_router(0)
    pair = router.choose(fleet, SOME, 0.0)
    assert isinstance(pair, Pair)
    entries = router.started(pair, SOME, 0.0)
    router.keep([])
    assert all_of(P[0], router) == (100, 1)
    for entry in entries.values():
        router.ended(entry)
    router.keep([])
    assert router.load_of(P[0]) == Load()
