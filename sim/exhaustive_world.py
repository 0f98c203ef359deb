"""One instance under a scheduler that may choose anything: real cores, and an environment of legal events.

In: actions, one at a time. Out: the actions that are possible next. After each action it checks that all ranks
that applied an entry have its digest, that every page is in one place, that nobody was told two outcomes, and
that no page left its attempt while a transfer, a copy or a launched batch may touch it on that rank.

With `lag` each hop of an entry is an action of its own; without, an entry goes all the way round at once, which
loses nothing (see `sim.exhaustive`). What a channel not in `late` carries reaches rank 0 at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from consensus.entry import (
    BOOTSTRAP,
    FILL,
    PREALLOC,
    RELEASE,
    SPILL,
    TRANSFER,
    Ballot,
    Entry,
    Key,
    PeerRef,
    RequestSpec,
    Return,
    SamplingParams,
    TokenOut,
    Trailer,
)
from consensus.recorder import Recorder
from consensus.store import Update
from consensus.votes import Bell
from decode.scheduler import DecodeReplica
from pipeline.effects import (
    Acknowledge,
    CloseRoom,
    CopyFromHost,
    CopyToHost,
    DropHostCopy,
    Effect,
    End,
    OpenRoom,
    Relay,
    Reply,
    Report,
    Run,
    Skip,
)
from pipeline.local import Observation
from pipeline.outcome import Outcome
from pipeline.planner import Batch
from pipeline.rank import RankCore
from pipeline.replica import ReplicaConfig, RoleState
from pipeline.sequencer import Sequencer
from prefill.scheduler import PrefillReplica
from sim.exhaustive_ports import Port

EPOCH = 1
SECOND = 1_000_000
FIRST_TOKEN = msgspec.msgpack.encode(TokenOut(100))  # as the hand-over carries it

Action = tuple[str | int | bool, ...]


class Violation(Exception):
    """An invariant does not hold; the schedule that led here is the counterexample."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is enumerated. Topics in `prompt_topics` are observed good at once, so that others get the room."""

    name: str
    prefill: bool
    ranks: int
    requests: tuple[tuple[int, int], ...]  # (prompt, max_tokens) each
    late: tuple[str, ...] = ("report", "back")  # channels to rank 0 that may be slow; the others are heard at once
    aborts: int = 1  # how many requests may be aborted, the first ones
    clock: tuple[int, ...] = ()  # readings, in seconds, to which rank 0's clock may jump
    timeout: int = 10**9  # of each request, in seconds
    pages: int = 4
    page_size: int = 4
    chunk_size: int = 8
    prompt_topics: tuple[str, ...] = ()
    bad: tuple[str, ...] = (BOOTSTRAP, PREALLOC, TRANSFER, SPILL, FILL)  # topics that may end badly
    caution: int | None = None  # decode's growth share in permille, as a long life may have left it


class NoRecorder(Recorder):
    """Keeps nothing: while searching, the path is the record."""

    def record(self, entry: Entry, notes: object, digest: bytes) -> None:
        return


class World:
    """All mutable state is in attributes, so that `sim.exhaustive_state` can freeze it."""

    def __init__(self, bounds: Bounds, lag: bool = False, record: bool = False) -> None:
        self.bounds, self.lag = bounds, lag
        ranks = bounds.ranks
        config = ReplicaConfig(
            EPOCH, ranks, bounds.pages, bounds.page_size, bounds.chunk_size, 8, 1, 64, (), 5 * SECOND, 8
        )
        kind = PrefillReplica if bounds.prefill else DecodeReplica
        self.cores = [RankCore(k, ranks, kind(config)) for k in range(ranks)]
        for core in self.cores:
            if not record:
                core.recorder = NoRecorder()
            if bounds.caution is not None:
                core.replica.restore_role(RoleState(share=bounds.caution))
        self.clock = 1
        self.sequencer = Sequencer(self.cores[0], ranks, self.clock)
        self.relay: list[deque[tuple[Entry, Trailer]]] = [deque() for _ in range(ranks)]  # into rank k
        self.reports: list[deque[Update | Bell]] = [deque() for _ in range(ranks)]
        self.back: deque[Acknowledge | Return] = deque()
        self.ports: list[dict[str, Port]] = [{} for _ in range(ranks)]
        self.copies: list[dict[str, CopyToHost | CopyFromHost]] = [{} for _ in range(ranks)]  # by room, under way
        self.drops: list[dict[str, None]] = [{} for _ in range(ranks)]  # rooms whose host copy is to be dropped
        self.flight: deque[Batch] = deque()  # launched, and not yet run by the last rank
        self.launched: dict[int, Batch] = {}  # tick → batch as rank 0 made it, until the last rank has made it too
        self.digests: dict[int, bytes] = {}  # seq → digest, until the last rank has applied it
        self.ends: dict[Key, Outcome] = {}
        self.aborts = [Key(f"r{i}", 0) for i in range(min(bounds.aborts, len(bounds.requests)))]
        self.times = [reading * SECOND for reading in bounds.clock]
        self.lines: list[str] | None = [] if record else None
        for i, (prompt, out) in enumerate(bounds.requests):
            peer = PeerRef("peer", "", EPOCH)
            timeout = bounds.timeout * SECOND
            self.sequencer.submit(
                RequestSpec(Key(f"r{i}", 0), tuple(range(prompt)), SamplingParams(max_tokens=out), peer, timeout)
            )
        self.settle()

    # -- what may happen -------------------------------------------------------------------------------

    def actions(self) -> list[tuple[Action, bool]]:
        """Each with whether it counts as progress: a state without any must be the end of everything.

        `entry` is listed always; `act` says whether rank 0 had something to write.
        """
        found: list[tuple[Action, bool]] = [(("entry",), True)]
        for k in range(self.bounds.ranks):
            if self.relay[k]:
                found.append((("relay", k), True))
            if self.reports[k]:
                found.append((("report", k), True))
            for room, port in self.ports[k].items():
                for topic, good, owed in port.events():
                    if good or topic in self.bounds.bad:
                        found.append((("observe", k, room, topic, good), owed))
            for room, copy in self.copies[k].items():
                topic = SPILL if isinstance(copy, CopyToHost) else FILL
                found += [
                    (("observe", k, room, topic, good), True)
                    for good in (True, False)
                    if good or topic in self.bounds.bad
                ]
            # The executor works in order: when it has dropped a host copy, no copy of that room runs any more.
            found += [
                (("observe", k, room, RELEASE, True), True) for room in self.drops[k] if room not in self.copies[k]
            ]
        if self.back:
            found.append((("back",), True))
        if self.flight and self._may_return():
            found.append((("tick",), True))
        found += [(("abort", key.request), False) for key in self.aborts]
        found += [(("clock", reading), False) for reading in self.times[:1]]
        return found

    def act(self, action: Action) -> bool:
        """Does it, with everything that is not a choice after it. False: rank 0 had nothing to write."""
        match action:
            case ("entry",):
                effects = self.sequencer.next_entry(self.clock, self.clock)
                if effects is None:
                    return False
                self._applied(0)
                self.perform(0, effects)
            case ("relay", int(k)):
                entry, trailer = self.relay[k].popleft()
                effects = self.cores[k].on_entry(entry, trailer)
                self._applied(k)
                self.perform(k, effects)
            case ("report", int(k)):
                self.sequencer.report(self.reports[k].popleft())
            case ("back",):
                self._hear(self.back.popleft())
            case ("tick",):
                self._run_last()
            case ("observe", int(k), str(room), str(topic), bool(good)):
                self._observe(k, room, topic, good)
            case ("abort", str(request)):
                key = next(key for key in self.aborts if key.request == request)
                self.aborts.remove(key)
                self.sequencer.cancel(key, "client")
            case ("clock", int(reading)):
                self.times.remove(reading)
                self.clock = reading
            case _:
                raise AssertionError(action)
        self.settle()
        return True

    def settle(self) -> None:
        """Carries out what is not a choice under these bounds, in one fixed order, then checks the pages."""
        while self._forced():
            pass
        for k, core in enumerate(self.cores):  # nobody listens to what is said of an attempt that is over
            self.drops[k] = {room: None for room in self.drops[k] if room in core.replica.attempts}
        for k in range(self.bounds.ranks):
            self._check_pages(k)

    def perform(self, k: int, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Relay(entry, trailer):
                    self._tell(f"rank {k} relays seq {entry.seq}, votes so far", trailer.votes)
                    self.relay[k + 1].append((entry, trailer))
                case Acknowledge(seq, ballots):
                    self._tell(f"rank {k} acknowledges seq {seq}, all votes", ballots)
                    self.back.append(effect)
                case Report(item):
                    self.reports[k].append(item)
                case Run(batch):
                    self._launched(k, batch)
                case End(key, outcome):
                    if key in self.ends:
                        raise Violation(f"{key.room} ends twice: {self.ends[key]} and {outcome}")
                    self.ends[key] = outcome
                case OpenRoom(key, _, _):
                    self.ports[k][key.room] = Port(self.bounds.prefill, k == self.bounds.ranks - 1)
                case CloseRoom(room):
                    if self.ports[k].pop(room).pages:
                        raise Violation(f"rank {k} closes {room} while its pages may still be touched")
                case CopyToHost(room, _, _) | CopyFromHost(room, _, _):
                    self.copies[k][room] = effect
                case DropHostCopy(room):
                    self.drops[k][room] = None
                case Reply() | Skip():
                    pass  # a rank may compute what need not be
                case _:
                    if (port := self.ports[k].get(effect.room)) is not None:
                        port.perform(effect)

    # -- what must hold at the end ---------------------------------------------------------------------

    def check_end(self) -> None:
        """The environment owes nothing more: every attempt ended once, and nothing of it is left anywhere."""
        missing = [f"r{i}" for i in range(len(self.bounds.requests)) if Key(f"r{i}", 0) not in self.ends]
        if missing:
            raise Violation(f"deadlock: nothing can happen and {', '.join(missing)} did not end")
        for core in self.cores:
            replica = core.replica
            left = {
                "requests": len(replica.requests),
                "rooms": len(replica.rooms),
                "observations": len(core.local),
                "store": len(core.store),
                "pages": replica.config.pages - replica.leases.count()["free"],
                "ticks": replica.slots.in_flight,
                "ports": len(self.ports[core.rank]),
                "copies": len(self.copies[core.rank]),
            }
            if any(left.values()):
                raise Violation(f"rank {core.rank} is not empty at the end: {left}")
        if any(self.sequencer.queues().values()):
            raise Violation(f"the sequencer is not empty at the end: {self.sequencer.queues()}")

    # -- inside ----------------------------------------------------------------------------------------

    def _tell(self, what: str, ballots: tuple[Ballot, ...]) -> None:
        if self.lines is not None:
            for ballot in ballots:
                good, bad = (
                    [str(stage.key.room) for stage in ballot.good],
                    [f"{s.key.room} ({why})" for s, why in ballot.bad],
                )
                self.lines.append(f"{what} on {ballot.topic}: good {good}, bad {bad}")

    def _forced(self) -> bool:
        """One step that the bounds leave no choice about; False if there is none."""
        bounds = self.bounds
        for k in range(bounds.ranks):
            if self.relay[k] and not self.lag:
                entry, trailer = self.relay[k].popleft()
                effects = self.cores[k].on_entry(entry, trailer)
                self._applied(k)
                self.perform(k, effects)
                return True
            if self.reports[k] and "report" not in bounds.late:
                self.sequencer.report(self.reports[k].popleft())
                return True
            for room, port in self.ports[k].items():
                for topic, good, _ in port.events():
                    if good and topic in bounds.prompt_topics:
                        self._observe(k, room, topic, True)
                        return True
        if self.back and "back" not in bounds.late:
            self._hear(self.back.popleft())
            return True
        return False

    def _hear(self, item: Acknowledge | Return) -> None:
        if isinstance(item, Return):
            self.sequencer.returned(item)
        else:
            self.sequencer.acknowledged(item.seq, item.ballots)

    def _observe(self, k: int, room: str, topic: str, good: bool) -> None:
        stage_seq = 0
        if topic == RELEASE and room in self.drops[k]:
            del self.drops[k][room]
        elif topic in (SPILL, FILL):
            stage_seq = self.copies[k].pop(room).stage_seq
        else:
            self.ports[k][room].observed(topic, good)
        payload = FIRST_TOKEN if topic == TRANSFER and good and k == 0 else b""
        observation = Observation(room, topic, good, "" if good else f"{topic} failed", payload, stage_seq)
        if k == 0:
            self.sequencer.observe(observation)
        else:
            self.perform(k, self.cores[k].observe(observation))

    def _launched(self, k: int, batch: Batch) -> None:
        """A rank queued a batch. Ranks before the last run it at once: the earliest their transfers can end."""
        last = self.bounds.ranks - 1
        first = self.launched.setdefault(batch.tick, batch)
        if first != batch:
            raise Violation(f"tick {batch.tick}: rank 0 runs {first}, rank {k} runs {batch}")
        if k == last:
            del self.launched[batch.tick]
        if k == 0:
            self.flight.append(batch)
        if k < last:
            self._ran(k, batch)

    def _may_return(self) -> bool:
        return self.flight[0].tick not in self.launched  # with lag, the last rank may not know it yet

    def _run_last(self) -> None:
        batch, last = self.flight.popleft(), self.bounds.ranks - 1
        self._ran(last, batch)
        sampled = [row for row in batch.rows if row.sample is not None]
        returned = Return(batch.tick, tuple(TokenOut(100 + row.start + len(row.tokens)) for row in sampled))
        if last == 0:
            self.sequencer.returned(returned)
        else:
            self.back.append(returned)

    def _ran(self, k: int, batch: Batch) -> None:
        for row in batch.rows:
            if row.sample is not None and row.key.room in self.ports[k]:
                self.ports[k][row.key.room].ran = True

    def _applied(self, k: int) -> None:
        """Invariant 1, beside the ranks' own comparison."""
        seq, digest = self.cores[k].cursor.applied, self.cores[k].replica.digest.value
        if self.digests.setdefault(seq, digest) != digest:
            raise Violation(f"rank {k} decided differently at seq {seq}")
        if k == self.bounds.ranks - 1:
            del self.digests[seq]

    def _check_pages(self, k: int) -> None:
        """Invariants 2 and 3 on one rank."""
        replica = self.cores[k].replica
        replica.audit()
        held = {key.room: lease.pages for key, lease in replica.leases.items()}
        for room, port in self.ports[k].items():
            self._hold(k, room, port.pages, held, "the transfer")
        for room, copy in self.copies[k].items():
            self._hold(k, room, copy.pages, held, "a copy")
        for batch in self.flight:
            if batch.tick < self.cores[k].replica.slots.next_tick:  # with lag, this rank may not know it yet
                for row in batch.rows:
                    self._hold(k, row.key.room, row.pages, held, f"tick {batch.tick}")

    @staticmethod
    def _hold(k: int, room: str, pages: tuple[int, ...], held: dict[str, tuple[int, ...]], who: str) -> None:
        mine = held.get(room, ())
        lost = [page for page in pages if page not in mine]
        if lost:
            raise Violation(f"rank {k}: pages {lost} left {room} while {who} may still touch them")
