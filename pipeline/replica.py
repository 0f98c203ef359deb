"""The replicated state of an instance, and how entries change it. Equal on every rank.

In: entries, in sequence. Out: effects for the shell, and after each entry a digest that equals every
other rank's. Nothing here knows what *this* rank has seen (that is `pipeline.local`), what time it is
(that is `entry.clock`) or which shell runs it.

`prefill.scheduler` and `decode.scheduler` derive from `Replica` and say what is special to them: the
lifecycle table, what an admission, a verdict and a returned token mean, and what to launch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from consensus.digest import Digest, Note
from consensus.entry import Abort, Admission, Entry, Key, Launch, RequestSpec, StageKey, TokenOut, Verdict
from pipeline.effects import CloseRoom, Effect, End, OpenRoom, Reply, Run, Skip, StopRoom
from pipeline.lease import LeaseBook, tick_holder
from pipeline.outcome import ERROR, Outcome
from pipeline.planner import Batch, Row, Share
from pipeline.request import ABORTING, DONE, Request
from pipeline.slots import Slots
from pipeline.workload import Workload


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """Equal on all ranks of an instance. `stage_timeout` is in microseconds."""

    epoch: int
    pp_size: int
    pages: int
    page_size: int
    chunk_size: int  # tokens of prompt per launched batch
    max_batch_rows: int
    async_depth: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    stage_timeout: int
    max_requests: int  # attempts known at once


class RoleState(msgspec.Struct, frozen=True):
    """What a role keeps besides the shared state (decode's turns and its caution), for snapshots."""

    turn: tuple[Key, ...] = ()
    needy: tuple[Key, ...] = ()
    share: int = 0


class Replica(ABC):
    """Requests by lifecycle state, pages, slots, digest."""

    first_state: str
    transitions: Mapping[str, tuple[str, ...]]
    topics: Mapping[str, str]  # state → topic that is voted on in it
    timed: frozenset[str]  # states with a stage deadline
    uses_store: bool  # whether PPConsensusStore agrees on anything on this side

    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self.leases = LeaseBook(config.pages)
        self.slots = Slots(config.pp_size + config.async_depth)
        self.digest = Digest(config.epoch)
        self.requests: dict[Key, Request] = {}
        self.attempts: dict[str, Key] = {}  # room → attempt, for as long as the attempt lives
        self.rooms: dict[str, Key] = {}  # hand-overs under way
        self.opened = 0
        self.states: dict[str, dict[Key, Request]] = {state: {} for state in self.transitions}
        self.moved: list[Request] = []  # requests the entry being applied put into a new stage
        self.seq = 0
        self.clock = 0
        self.counters = {"prompt_tokens_computed": 0, "tokens_generated": 0, "requests_ended": 0}
        self._effects: list[Effect] = []

    # -- applying an entry ------------------------------------------------------------------------

    def apply(self, entry: Entry) -> list[Effect]:
        """Everything of an entry but its launch; the order of kinds is part of the protocol."""
        self.seq, self.clock = entry.seq, entry.clock
        for spec in entry.requests:
            self._open(spec)
        for abort in entry.aborts:
            self._abort(abort)
        for admission in entry.admissions:
            if (request := self.requests.get(admission.key)) is not None:
                self.on_admission(request, admission)
        for verdict in entry.verdicts:
            self._verdict(verdict)
        for returned in entry.returns:
            self._harvest(returned.tick, returned.tokens)
        self.maintain()
        return self._drain()

    def launch(self, launch: Launch) -> list[Effect]:
        """Schedules and commits a microbatch; `plan` must have something for it. `Run` comes last."""
        shares = self.plan(launch.rows)
        assert shares, "an empty launch is never logged"
        rows: list[Row] = []
        holder = tick_holder(launch.tick)
        for share in shares:
            request = self.requests[share.key]
            rows.append(self.make_row(request, share))
            request.ticks.append(launch.tick)
            request.computed = share.start + share.count
            self.leases.hold(share.key, holder)
            self.digest.note("row", launch.tick, share.key.request, share.key.attempt, share.start, share.count)
        batch = Batch(launch.tick, launch.slot, tuple(rows))
        self.slots.launch(batch, self.clock)
        self.emit(Run(batch))
        return self._drain()

    def choose_launch(self) -> Launch | None:
        """Rank 0: what to launch now, if a slot is free and the scheduler has work for it."""
        slot = self.slots.first_free()
        if slot is None or not (ready := self.ready()):
            return None
        # Greedy launching must not put all the work into one slot, nor split it more than slots exist.
        rows = min(self.config.max_batch_rows, -(-ready // self.slots.free))
        if not self.plan(1):  # whoever gets a share of one row gets one of many
            return None
        return Launch(self.slots.next_tick, slot, rows)

    def fold(self) -> tuple[Note, ...]:
        """Ends the entry: folds its decisions into the digest and returns them for the recorder."""
        self.moved.clear()
        return self.digest.fold()

    # -- what the roles say ------------------------------------------------------------------------

    @abstractmethod
    def refuse(self, spec: RequestSpec) -> str:
        """Why this attempt can never run here, or an empty string."""

    @abstractmethod
    def on_abort(self, request: Request, outcome: Outcome) -> None: ...

    @abstractmethod
    def on_admission(self, request: Request, admission: Admission) -> None: ...

    @abstractmethod
    def on_good(self, request: Request, topic: str, payload: bytes) -> None: ...

    @abstractmethod
    def on_bad(self, request: Request, topic: str, reason: str) -> None: ...

    @abstractmethod
    def on_harvest(self, request: Request, row: Row, token: TokenOut | None) -> None: ...

    @abstractmethod
    def maintain(self) -> None:
        """Runs at the end of every entry: give pages to what waits for them."""

    @abstractmethod
    def ready(self) -> int:
        """How many attempts could take part in a launch now."""

    @abstractmethod
    def plan(self, rows: int) -> list[Share]:
        """At most `rows` shares for the next batch; reads only, changes nothing."""

    @abstractmethod
    def make_row(self, request: Request, share: Share) -> Row:
        """Commits a share: takes pages where the attempt has none yet, and builds its row."""

    def role_state(self) -> RoleState:
        """What the role keeps besides the shared state; for snapshots."""
        return RoleState()

    def restore_role(self, state: RoleState) -> None:
        assert state == RoleState(), "this role keeps nothing of its own"

    def audit(self) -> None:
        """Proves what is kept at every change against all that exists. Raises AssertionError otherwise."""
        self.leases.audit()

    # -- asked by votes and timers -----------------------------------------------------------------

    def is_votable(self, topic: str, key: StageKey) -> bool:
        request = self.requests.get(key.key)
        return request is not None and request.stage_seq == key.stage_seq and self.topics.get(request.state) == topic

    def count_requests(self) -> dict[str, int]:
        return {state: len(members) for state, members in self.states.items() if state != DONE}

    def workload(self) -> Workload:
        """For those who choose among instances."""
        requests = self.count_requests()
        return Workload(
            queued_tokens=self.queued_tokens(),
            free_pages=self.leases.pool.free,
            requests=sum(requests.values()),
            batch=requests.get("running", 0),
            computed=self.counters["prompt_tokens_computed"],
        )

    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed here."""
        return 0

    # -- shared by the roles -----------------------------------------------------------------------

    def move(self, request: Request, state: str) -> None:
        """Puts an attempt into its next stage; an illegal step is a bug and stops the rank."""
        key = request.key
        assert state in self.transitions[request.state], f"{key}: {request.state} → {state}"
        self.digest.note("move", key.request, key.attempt, request.state, state)
        del self.states[request.state][key]
        request.state, request.stage_seq = state, self.seq
        if state == DONE:
            del self.requests[key]
            del self.attempts[key.room]
            self.counters["requests_ended"] += 1
            self.moved.append(request)
            return
        self._enter(request)

    def end(self, request: Request, outcome: Outcome) -> None:
        """Tells the attempt's one outcome on this side."""
        key = request.key
        self.digest.note("end", key.request, key.attempt, outcome.kind, outcome.output_tokens)
        self.emit(End(key, outcome))

    def finish(self, request: Request) -> None:
        """Ends the stay of an attempt whose pages, if any, nobody else holds."""
        self.move(request, DONE)
        self.close_room(request)

    def close_room(self, request: Request) -> None:
        """The hand-over is over on this side, once; what is still said about the room is ignored."""
        if self.rooms.pop(request.key.room, None) is not None:
            self.emit(CloseRoom(request.key.room))

    def start_aborting(self, request: Request, outcome: Outcome) -> None:
        """Tells the outcome and waits for proof that the pages are quiet: the release verdict."""
        self.end(request, outcome)
        self.emit(StopRoom(request.key.room, outcome.reason))
        self.move(request, ABORTING)

    def end_when_harvested(self, request: Request, outcome: Outcome) -> None:
        """Launched ticks keep the attempt until they return; those that compute for nobody else need not be run."""
        assert request.ticks and request.ending is None
        request.ending = outcome
        for batch in self.slots.flight:
            if batch.tick in request.ticks and all(self.requests[row.key].ending for row in batch.rows):
                self.emit(Skip(batch.tick))

    def reply(self, request: Request, token: TokenOut) -> None:
        key = request.key
        request.output.append(token.token)
        self.digest.note("token", key.request, key.attempt, token.token)
        self.emit(Reply(key, request.told - 1, (token,)))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    # -- inside ------------------------------------------------------------------------------------

    def _open(self, spec: RequestSpec) -> None:
        key = spec.key
        if key in self.requests:
            return  # submitted twice: the first one counts
        why = self.refuse(spec)
        if not why and len(self.requests) >= self.config.max_requests:
            why = f"the instance already knows {self.config.max_requests} requests"
        if why:
            self.digest.note("refuse", key.request, key.attempt)
            self.emit(End(key, Outcome(ERROR, why)))
            return
        self.opened += 1
        request = Request(spec, self.first_state, self.clock, self.seq, self.opened, self.config.max_model_len)
        self.requests[key] = request
        self.attempts[key.room] = self.rooms[key.room] = key
        self.digest.note("open", key.request, key.attempt, len(spec.prompt), spec.resumed)
        self._enter(request)
        self.emit(OpenRoom(key, spec.peer, len(spec.prompt), spec.token))

    def _enter(self, request: Request) -> None:
        self.states[request.state][request.key] = request
        request.stage_deadline = self.clock + self.config.stage_timeout if request.state in self.timed else 0
        self.moved.append(request)

    def _abort(self, abort: Abort) -> None:
        request = self.requests.get(abort.key)
        if request is None or request.state == ABORTING or request.ending is not None:
            return
        outcome = Outcome(abort.kind, abort.reason, request.told, abort.retryable, abort.hand_over)
        self.on_abort(request, outcome)

    def _verdict(self, verdict: Verdict) -> None:
        # A key that has left its stage since the ballot is skipped, identically on every rank.
        for stage, payload in verdict.good:
            if self.is_votable(verdict.topic, stage):
                self.on_good(self.requests[stage.key], verdict.topic, payload)
        for stage, reason in verdict.bad:
            if self.is_votable(verdict.topic, stage):
                self.on_bad(self.requests[stage.key], verdict.topic, reason)

    def _harvest(self, tick: int, tokens: Sequence[TokenOut]) -> None:
        batch = self.slots.harvest(tick, self.clock)
        self.digest.note("harvest", tick)
        sampled, holder = iter(tokens), tick_holder(tick)
        for row in batch.rows:
            token = next(sampled) if row.sample is not None else None
            # A request cannot be gone: a launched tick keeps it until its harvest.
            request = self.requests[row.key]
            request.ticks.remove(tick)
            self.leases.drop(row.key, holder)
            self.on_harvest(request, row, token)
        assert next(sampled, None) is None, f"tick {tick} returned more tokens than rows asked for"

    def _drain(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
