"""From a seed to a case: which cluster, which requests, which faults.

Small on purpose: a handful of requests on pools of a few pages reaches the rare orders of events far more
often per second than load does. `PROFILES` name what may be drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sim import case as kinds
from sim.case import (
    ADMIN,
    BLINK,
    CORRUPT,
    CRASH,
    CUT,
    DRAIN,
    FAIL_LATE,
    FAIL_QUIET,
    FAULTS,
    FREEZE,
    HOLD_BACK,
    HOLD_RELAY,
    HOLD_REPORTS,
    KILL_RANK,
    LOSE,
    MS,
    SECOND,
    SILENT_RANK,
    SLOW,
    STALL,
    STUTTER,
    Case,
    Delays,
    Fault,
    InstancePlan,
    RequestPlan,
)

DAY = 86_400 * SECOND
PAGES = (4, 6, 8, 12, 24)
ON_WRITES = (FAIL_QUIET, FAIL_LATE, STALL, LOSE, CORRUPT)
BLINKS = "blinks"  # cuts that are too short to fail anything


@dataclass(frozen=True, slots=True)
class Profile:
    faults: float  # share of runs with any
    kinds: tuple[str, ...]
    cancels: float  # share of runs with an abort storm
    deadlines: float  # share of runs with a deadline storm
    bounded: float  # share of runs on ring channels with capacity 0 or 1
    most_ranks: int
    requests: tuple[int, int]
    prompt: int = 40  # the most
    output: tuple[float, float] = (0.0, 12.0)  # least and most; below 1: as a share of the smallest pool
    prefill_pages: tuple[int, ...] = PAGES
    decode_pages: tuple[int, ...] = PAGES
    parked: tuple[int, ...] = ()  # bounds of a prefill rank's early destinations; none: the default
    checksums: bool = False
    leased: bool = False
    skew: int = 0


# The profiles, from gentle to rough: "grow" makes running requests outgrow the pool, "prompts" has prompts
# that do not fit into it side by side, "blinks" cuts links for so short a time that nothing may fail, "corrupt"
# damages what lands, "leases" is "transfer" with an engine that checks each write, "freezes" has ranks that stand
# still, "slow" a rank 0 that does not keep up and sides that repeat themselves, "operators" instances that are
# drained and inspected, "early" logs so late that peers overtake them.
PROFILES = {
    "mixed": Profile(0.5, FAULTS, 0.35, 0.15, 0.25, 8, (4, 12)),
    "calm": Profile(0.0, (), 0.0, 0.0, 0.25, 8, (6, 20)),
    "aborts": Profile(0.0, (), 1.0, 0.3, 0.25, 4, (6, 20)),
    "faults": Profile(1.0, FAULTS, 0.3, 0.1, 0.1, 4, (4, 12)),
    "transfer": Profile(1.0, (FAIL_QUIET, FAIL_LATE, STALL, LOSE, CUT), 0.6, 0.1, 0.0, 3, (4, 12)),
    "deaths": Profile(1.0, (CRASH, KILL_RANK), 0.3, 0.1, 0.1, 3, (4, 12)),
    "grow": Profile(0.3, (HOLD_RELAY, STALL, CRASH), 0.4, 0.1, 0.1, 4, (4, 10), 6, (0.3, 0.7), (8,), (8,)),
    "blinks": Profile(1.0, (BLINKS, STALL, HOLD_REPORTS), 0.3, 0.0, 0.0, 3, (4, 12)),
    "prompts": Profile(0.0, (), 0.2, 0.0, 0.1, 3, (6, 12), 40, (0.0, 3.0), (4, 6), (24, 48)),
    "corrupt": Profile(
        1.0, (CORRUPT, CORRUPT, CUT, STALL, HOLD_REPORTS), 0.3, 0.0, 0.1, 4, (4, 12), checksums=True, skew=DAY
    ),
    "leases": Profile(
        1.0,
        (FAIL_QUIET, FAIL_LATE, STALL, LOSE, CUT, CRASH),
        0.6,
        0.1,
        0.0,
        3,
        (4, 12),
        checksums=True,
        leased=True,
        skew=DAY,
    ),
    "zero": Profile(0.3, (HOLD_RELAY, HOLD_BACK, HOLD_REPORTS), 0.5, 0.1, 1.0, 6, (6, 20)),
    "freezes": Profile(1.0, (FREEZE, FREEZE, FREEZE, STALL, LOSE, KILL_RANK), 0.4, 0.1, 0.2, 4, (4, 12)),
    "slow": Profile(1.0, (SLOW, SLOW, STUTTER, STUTTER, HOLD_RELAY, FAIL_QUIET), 0.5, 0.1, 0.2, 4, (6, 20)),
    "operators": Profile(1.0, (DRAIN, ADMIN), 0.3, 0.1, 0.1, 3, (6, 16), skew=DAY),
    "early": Profile(1.0, (HOLD_RELAY, HOLD_RELAY, STALL), 0.6, 0.1, 0.0, 4, (6, 20), parked=(1, 2, 4)),
}


def draw(seed: int, profile: str = "mixed") -> Case:
    random, chosen = Random(seed), PROFILES[profile]
    prefill = tuple(_instance(random, chosen, chosen.prefill_pages) for _ in range(_few(random)))
    decode = tuple(_instance(random, chosen, chosen.decode_pages) for _ in range(_few(random)))
    most = max(plan.ranks for plan in (*prefill, *decode))
    page_size = random.choice((2, 4, 4, 8))
    span = random.choice((20, 100, 400)) * MS
    requests = _requests(random, chosen, page_size, prefill, decode, span)
    faults: list[Fault] = []
    if random.random() < chosen.faults:
        faults = [_fault(random, chosen, prefill, decode, span) for _ in range(random.choice((1, 1, 2, 3)))]
    return Case(
        seed=seed,
        prefill=prefill,
        decode=decode,
        requests=requests,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        delays=_delays(random),
        layers=max(most, random.choice((2, 3, 4))),
        page_size=page_size,
        checksums=chosen.checksums,
        leased=chosen.leased,
        skew=chosen.skew,
        capacity=random.choice((0, 1)) if random.random() < chosen.bounded else None,
        tail=random.choice((200 * MS, 2 * SECOND)),
        parked=random.choice(chosen.parked) if chosen.parked else 1024,
    )


def _few(random: Random) -> int:
    return random.choice((1, 1, 1, 2, 2, 3))


def _instance(random: Random, profile: Profile, pages: tuple[int, ...]) -> InstancePlan:
    ranks = random.choice((1, 1, 2, 2, 2, 3, 3, 4)) if random.random() < 0.93 else random.choice((5, 6, 8))
    ranks = min(ranks, profile.most_ranks)
    base = random.choice((500, 2 * MS, 10 * MS))
    slow = random.choice((1, 1, 1, 10))
    forward = [base] * ranks
    forward[random.randrange(ranks)] *= slow
    return InstancePlan(
        ranks=ranks,
        pages=random.choice(pages),
        chunk=random.choice((4, 8, 16)),
        rows=random.choice((2, 4, 8)),
        async_depth=random.choice((0, 1, 2)),
        forward=tuple(forward),
        per_token=random.choice((0, 100)),
        stage_timeout=60 * SECOND if random.random() < 0.9 or not profile.faults else random.choice((1, 5)) * SECOND,
        host_pages=1000 if random.random() < 0.9 or not profile.faults else random.choice((0, 3)),
    )


def _requests(
    random: Random,
    profile: Profile,
    page_size: int,
    prefill: tuple[InstancePlan, ...],
    decode: tuple[InstancePlan, ...],
    span: int,
) -> tuple[RequestPlan, ...]:
    smallest = min(plan.pages for plan in (*prefill, *decode)) * page_size
    storm = random.random() < profile.cancels
    hurry = random.random() < profile.deadlines
    plans = []
    for number in range(random.randint(*profile.requests)):
        prompt = random.randint(1, max(1, min(profile.prompt, smallest - 1)))
        least, most = (int(bound if bound >= 1 else bound * smallest) for bound in profile.output)
        output = random.randint(max(1, least), max(1, least, min(most, smallest - prompt)))
        if random.random() < 0.02:
            prompt = smallest + 1  # too large for some instance: refused there
        plans.append(
            RequestPlan(
                name=f"r{number}",
                at=random.randint(0, span),
                prompt=prompt,
                output=output,
                timeout=random.randint(MS, span) if hurry and random.random() < 0.5 else 3600 * SECOND,
                cancel=random.randint(1, span) if storm and random.random() < 0.5 else 0,
                ignore_eos=random.random() < (0.3 if profile.prompt > 6 else 0.9),
                twice=random.random() < 0.1 and prompt + output <= smallest,
                any_epoch=random.random() < 0.1,
            )
        )
    return tuple(plans)


def _fault(
    random: Random,
    profile: Profile,
    prefill: tuple[InstancePlan, ...],
    decode: tuple[InstancePlan, ...],
    span: int,
) -> Fault:
    kind, at = random.choice(profile.kinds), random.randint(0, 2 * span)
    p, d = random.randrange(len(prefill)), random.randrange(len(decode))
    if kind in (CUT, BLINKS):
        length = random.choice((0, 20 * MS, 2 * SECOND, 15 * SECOND) if kind == CUT else (0, 0, 20 * MS, BLINK))
        return Fault(CUT, at // (1 if kind == CUT else 2), rank=p, value=d, length=length)
    on_prefill = kind in ON_WRITES or random.random() < 0.5
    plan = prefill[p] if on_prefill else decode[d]
    rank = random.randrange(plan.ranks)
    name = f"P{p}" if on_prefill else f"D{d}"
    if kind in ON_WRITES:
        return Fault(kind, at // 4, name, rank, random.choice((50 * MS, 1 * SECOND)), random.choice((1, 1, 3, 8)))
    if kind in (FREEZE, SLOW, STUTTER, DRAIN, ADMIN):
        return _slower_fault(random, kind, at // 2, name, rank)
    if kind == CRASH:
        return Fault(kind, at, name, 0, random.choice((10 * MS, 500 * MS, 3 * SECOND)))
    if kind == KILL_RANK:
        wait = random.choice((0, 10 * MS, 500 * MS))
        return Fault(kind, at, name, rank, random.choice((10 * MS, 3 * SECOND)), wait)
    return Fault(kind, at, name, max(rank, 1) if kind == HOLD_RELAY else rank, random.choice((5, 50, 2000)) * MS)


def _slower_fault(random: Random, kind: str, at: int, name: str, rank: int) -> Fault:
    if kind == FREEZE:
        lengths = (5 * MS, 50 * MS, 500 * MS, 3 * SECOND, SILENT_RANK - SECOND, SILENT_RANK + SECOND)
        return Fault(kind, at, name, rank, random.choice(lengths))
    length = random.choice((50 * MS, 500 * MS, 3 * SECOND))
    match kind:
        case kinds.SLOW:
            return Fault(kind, at, name, 0, length, random.choice((200, 2 * MS, 20 * MS)))
        case kinds.DRAIN:
            return Fault(kind, at, name, 0, length, random.choice((0, 20 * MS, 2 * SECOND)))
        case kinds.ADMIN:
            return Fault(kind, at, name, 0, length, random.choice((1, 3, 8)))
        case _:
            return Fault(kind, at, name, rank, length)


def _delays(random: Random) -> Delays:
    return Delays(
        ring=random.choice(((20, 200), (5, 2000), (1, 20), (500, 5000))),
        link=random.choice(((50, 500), (10, 20 * MS), (1, 20))),
        engine=random.choice(((200, 5 * MS), (10, 50 * MS), (1, 100))),
        copy=random.choice(((200, 5 * MS), (5 * MS, 100 * MS))),
        loop=random.choice(((0, 50), (0, 1000), (0, 0))),
        straggler=random.choice((0.0, 0.01, 0.05)),
    )
