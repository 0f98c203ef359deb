"""Decode's scheduler: who gets pages, who is in the next batch, and what the log's events mean.

Invariants: pages come in log order, and the first attempt that does not fit stops the rest; an attempt
is in at most one tick at a time, and only if the page it writes into is its own; turns go round, so
that none starves when not all fit into a batch. When the pool runs dry the youngest makes room
(`decode.retract`); nothing new is let in while anything is retracted.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from consensus import entry
from consensus.entry import Admission, Key, RequestSpec, TokenOut
from decode import lifecycle
from decode.lifecycle import (
    FILLING,
    GRANTED,
    GROWING,
    PREALLOCATING,
    READY,
    RETRACTED,
    RUNNING,
    SPILLING,
    TIMED,
    TOPICS,
    TRANSFERRING,
    TRANSITIONS,
)
from decode.retract import GrowthShare, choose_victim
from pipeline.effects import CopyFromHost, CopyToHost, DropHostCopy, SendDestinations, StopRoom
from pipeline.lease import REQUEST, WRITER, copy_holder
from pipeline.outcome import ERROR, Outcome
from pipeline.planner import Row, Share
from pipeline.replica import Replica, ReplicaConfig, RoleState
from pipeline.request import ABORTING, Request


class DecodeReplica(Replica):
    first_state = PREALLOCATING
    transitions = TRANSITIONS
    topics = TOPICS
    timed = TIMED
    uses_store = False

    def __init__(self, config: ReplicaConfig) -> None:
        super().__init__(config)
        self._turn: dict[Key, None] = {}  # may be in the next batch, in order of their turn
        self._needy: dict[Key, None] = {}  # could be, if they had one more page
        self._share = GrowthShare()
        self._decoder = msgspec.msgpack.Decoder(TokenOut)
        self.counters |= {"retracted": 0, "resumed": 0}

    def move(self, request: Request, state: str) -> None:
        if request.state in GROWING:
            self._share.leave(request)
        super().move(request, state)
        if state in GROWING:
            self._share.enter(request)

    # -- what the log's events mean ----------------------------------------------------------------

    def refuse(self, spec: RequestSpec) -> str:
        # The last token that can be generated is never run, so its KV needs no place.
        most = len(spec.prompt) - spec.resumed + spec.params.max_tokens - 1
        need = self.pages_for(min(most, self.config.max_model_len))
        if need > self.config.pages:
            return f"prompt and max_tokens need {need} pages, the pool has {self.config.pages}"
        return ""

    def on_admission(self, request: Request, admission: Admission) -> None:
        raise AssertionError("the store decides nothing on the decode side")

    def on_abort(self, request: Request, outcome: Outcome) -> None:
        match request.state:
            case lifecycle.PREALLOCATING | lifecycle.GRANTED:
                self.end(request, outcome)
                self.emit(StopRoom(request.key.room, outcome.reason))
                self.finish(request)
            case lifecycle.TRANSFERRING:
                self._quarantine(request, outcome)
            case lifecycle.SPILLING | lifecycle.FILLING:
                # The outcome goes out at once; the pages wait for the verdict on the copy.
                request.ending = outcome
                self.end(request, outcome)
                self.leases.drop(request.key, REQUEST)
            case lifecycle.RETRACTED:
                self.emit(DropHostCopy(request.key.room))
                self._complete(request, outcome)
            case _ if request.ticks:
                self.end_when_harvested(request, outcome)
            case _:
                self._complete(request, outcome)

    def on_good(self, request: Request, topic: str, payload: bytes) -> None:
        match topic:
            case entry.PREALLOC:
                self.move(request, GRANTED)
            case entry.TRANSFER:
                self.leases.drop(request.key, WRITER)
                self._receive(request, self._decoder.decode(payload))
            case entry.SPILL | entry.FILL:
                self._copied(request, topic == entry.SPILL)
            case _:
                self.leases.drop(request.key, WRITER)
                self.finish(request)

    def on_bad(self, request: Request, topic: str, reason: str) -> None:
        match topic:
            case entry.PREALLOC:
                text = f"handshake with prefill failed: {reason}"
                self.on_abort(request, Outcome(ERROR, text, request.told, True, True))
            case entry.TRANSFER:
                self._quarantine(request, Outcome(ERROR, f"KV transfer failed: {reason}", request.told, True, True))
            case entry.SPILL | entry.FILL:
                self._copy_failed(request, reason)
            case _:
                raise AssertionError("a fence cannot fail")

    def on_harvest(self, request: Request, row: Row, token: TokenOut | None) -> None:
        assert token is not None, "every decode row yields a token"
        if request.ending is not None:
            self._complete(request, request.ending)
            return
        self.counters["tokens_generated"] += 1
        self._tell(request, token)
        self._go_on(request)

    # -- pages: grow, make room, resume, allocate --------------------------------------------------

    def maintain(self) -> None:
        self._grow()
        if self._needy:
            self._make_room()
            return
        if not self.states[SPILLING]:
            self._resume()
        if not self.states[SPILLING] and not self.states[RETRACTED]:
            self._allocate()

    def _grow(self) -> None:
        # Oldest first: whoever came first must not wait for a page that a younger one took.
        for request in sorted((self.requests[key] for key in self._needy), key=lambda r: r.number):
            if not self.leases.fits(1):
                return
            pages = self.leases.grow(request.key, 1)
            self.digest.note("pages", request.key.request, request.key.attempt, pages)
            del self._needy[request.key]
            self._turn[request.key] = None

    def _make_room(self) -> None:
        """The pool is dry. One spill at a time: its pages may be enough."""
        if self.states[SPILLING]:
            return
        holding = [*self.states[READY].values(), *self.states[RUNNING].values()]
        holding.sort(key=lambda r: r.number)
        idle = [r for r in holding if not r.ticks]
        needy = min((self.requests[key] for key in self._needy), key=lambda r: r.number)
        victim = choose_victim(needy, idle)
        if victim is None:
            return
        self._turn.pop(victim.key, None)
        self._needy.pop(victim.key, None)
        self._share.retracted()
        self.counters["retracted"] += 1
        self.move(victim, SPILLING)
        self.leases.hold(victim.key, copy_holder(self.seq))
        self.emit(CopyToHost(victim.key.room, self.seq, self._written_pages(victim)))

    def _resume(self) -> None:
        for request in list(self.states[RETRACTED].values()):
            need = self.pages_for(request.length)
            # Each running request may need a page at once; coming back must not make another one leave.
            if not self.leases.fits(need + len(self.states[RUNNING]) + len(self.states[READY])):
                return
            lease = self.leases.open(request.key, need, REQUEST, copy_holder(self.seq))
            self.digest.note("pages", request.key.request, request.key.attempt, lease.pages)
            self.move(request, FILLING)
            self.emit(CopyFromHost(request.key.room, self.seq, self._written_pages(request)))

    def _allocate(self) -> None:
        granted = self.states[GRANTED]
        while granted:
            request = next(iter(granted.values()))  # no copy: thousands may wait
            need = self.pages_for(min(request.prompt_len + 1, self.config.max_model_len))
            if not self.leases.fits(need):
                return
            # Alone it fits, or it would have been refused; with others it leaves them room to grow.
            if not self.leases.fits(need + self._share.expected_with(request, self.config.page_size)):
                return
            lease = self.leases.open(request.key, need, REQUEST, WRITER)
            self.digest.note("pages", request.key.request, request.key.attempt, lease.pages)
            self.move(request, TRANSFERRING)
            self.emit(SendDestinations(request.key.room, lease.pages[: self.pages_for(request.prompt_len)]))

    # -- launching -----------------------------------------------------------------------------------

    def ready(self) -> int:
        return len(self._turn)

    def plan(self, rows: int) -> list[Share]:
        shares: list[Share] = []
        requests = self.requests
        for key in islice(self._turn, rows):
            request = requests[key]
            shares.append(Share(key, len(request.spec.prompt) + len(request.output) - 1, 1))
        return shares

    def make_row(self, request: Request, share: Share) -> Row:
        del self._turn[request.key]
        if request.state == READY:
            self.move(request, RUNNING)
        pages = self.leases.get(request.key).pages
        return Row(request.key, share.start, (request.output[-1],), pages, request.sample(self.config.eos_ids))

    # -- snapshots -----------------------------------------------------------------------------------

    def role_state(self) -> RoleState:
        return RoleState(tuple(self._turn), tuple(self._needy), self._share.permille)

    def restore_role(self, state: RoleState) -> None:
        self._turn, self._needy = dict.fromkeys(state.turn), dict.fromkeys(state.needy)
        self._share = GrowthShare()
        self._share.permille = state.share
        for name in GROWING:
            for request in self.states[name].values():
                self._share.enter(request)

    def audit(self) -> None:
        super().audit()
        members = [request for state in GROWING for request in self.states[state].values()]
        left = sum(request.left for request in members)
        known = (self._share.members, self._share.left)
        assert known == (len(members), left), f"growth is kept for {known}, and is {len(members), left}"

    # -- inside --------------------------------------------------------------------------------------

    def _written_pages(self, request: Request) -> tuple[int, ...]:
        """The pages that hold KV: all positions but the last token's."""
        return self.leases.get(request.key).pages[: self.pages_for(request.length - 1)]

    def _receive(self, request: Request, first: TokenOut) -> None:
        """All KV is here. The prefill side told the client the first token already; positions let it drop one."""
        request.computed = request.prompt_len
        self._tell(request, first)
        self.move(request, READY)
        self.close_room(request)
        self._go_on(request)

    def _tell(self, request: Request, token: TokenOut) -> None:
        self.reply(request, token)
        self._share.grew()

    def _go_on(self, request: Request) -> None:
        outcome = request.finish(self.config.eos_ids)
        if outcome is not None:
            self._share.finished()
            self._complete(request, outcome)
        elif self.pages_for(request.length) <= len(self.leases.get(request.key).pages):
            self._turn[request.key] = None
        else:
            self._needy[request.key] = None

    def _complete(self, request: Request, outcome: Outcome) -> None:
        """Ends an attempt whose pages nobody but it and its harvested ticks ever touch."""
        self._turn.pop(request.key, None)
        self._needy.pop(request.key, None)
        self.end(request, outcome)
        self.leases.drop(request.key, REQUEST)
        self.finish(request)

    def _quarantine(self, request: Request, outcome: Outcome) -> None:
        """Prefill may still write into the pages: they wait for the release verdict."""
        self.leases.drop(request.key, REQUEST)
        self.start_aborting(request, outcome)

    def _copied(self, request: Request, spilled: bool) -> None:
        self.leases.drop(request.key, copy_holder(request.stage_seq))
        if request.ending is not None:  # its outcome is told
            if spilled:
                self.emit(DropHostCopy(request.key.room))
            self.finish(request)
        elif spilled:
            self.leases.drop(request.key, REQUEST)
            self.move(request, RETRACTED)
        else:
            self.counters["resumed"] += 1
            self.move(request, RUNNING)
            self._go_on(request)

    def _copy_failed(self, request: Request, reason: str) -> None:
        """Host memory is full, say: the attempt ends here and may be prefilled again elsewhere.

        One rank's failure says nothing about the other ranks' copies, which may still be under way: the pages
        wait for the release vote, in which each rank says that its own copy has ended.
        """
        self.emit(DropHostCopy(request.key.room))
        self.leases.hold(request.key, WRITER)
        self.leases.drop(request.key, copy_holder(request.stage_seq))
        if request.ending is None:
            text = f"retracted, and its KV could not be kept: {reason}"
            self.end(request, Outcome(ERROR, text, request.told, True))
            self.leases.drop(request.key, REQUEST)
        self.move(request, ABORTING)
