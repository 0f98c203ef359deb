"""Prefill's scheduler: which prompts are computed next, and what the log's events mean for them.

Invariants: a prompt gets all its pages at its first chunk or is not started (two half-prefilled prompts
would deadlock the pool); work that holds pages comes before anything new; first come, first served in
log order. Consecutive chunks of a long prompt go into consecutive slots without waiting for one another.
"""

from __future__ import annotations

import msgspec

from consensus.entry import TRANSFER, Admission, RequestSpec, TokenOut
from pipeline.effects import FirstToken, StartSender, StopRoom
from pipeline.lease import REQUEST, SENDER
from pipeline.outcome import ERROR, HANDED_OVER, Outcome
from pipeline.planner import Row, Share
from pipeline.replica import Replica, ReplicaConfig
from pipeline.request import Request
from prefill.lifecycle import BOOTSTRAPPING, INFLIGHT, RUNNING, TIMED, TOPICS, TRANSITIONS, WAITING


class PrefillReplica(Replica):
    first_state = BOOTSTRAPPING
    transitions = TRANSITIONS
    topics = TOPICS
    timed = TIMED
    uses_store = True

    def __init__(self, config: ReplicaConfig) -> None:
        super().__init__(config)
        self._encoder = msgspec.msgpack.Encoder()

    def refuse(self, spec: RequestSpec) -> str:
        need = self.pages_for(len(spec.prompt))
        if need > self.config.pages:
            return f"the prompt needs {need} pages, the pool has {self.config.pages}"
        return ""

    def on_admission(self, request: Request, admission: Admission) -> None:
        if admission.ok:
            if request.state == BOOTSTRAPPING:
                self.move(request, WAITING)
        elif request.state in (BOOTSTRAPPING, WAITING, RUNNING) and request.ending is None:
            # Valid until the hand-over votes take over: a peer that fails early must not cost a forward.
            text = f"bootstrap failed: {admission.reason}"
            self.on_abort(request, Outcome(ERROR, text, request.told, True, True))

    def on_abort(self, request: Request, outcome: Outcome) -> None:
        if request.state in (BOOTSTRAPPING, WAITING):
            self.end(request, outcome)
            self.emit(StopRoom(request.key.room, outcome.reason))
            self.finish(request)
        elif request.ticks:
            # Launched chunks are harvested first; the sender stops now.
            self.emit(StopRoom(request.key.room, outcome.reason))
            self.end_when_harvested(request, outcome)
        else:
            self._quarantine(request, outcome)

    def on_good(self, request: Request, topic: str, payload: bytes) -> None:
        if topic == TRANSFER:
            handed_over = Outcome(HANDED_OVER, output_tokens=request.told)
            self.end(request, request.finish(self.config.eos_ids) or handed_over)
            self.leases.drop(request.key, REQUEST)
        self.leases.drop(request.key, SENDER)
        self.finish(request)

    def on_bad(self, request: Request, topic: str, reason: str) -> None:
        assert topic == TRANSFER, "a fence cannot fail"
        self._quarantine(request, Outcome(ERROR, f"KV transfer failed: {reason}", request.told, True, True))

    def on_harvest(self, request: Request, row: Row, token: TokenOut | None) -> None:
        if request.ending is not None:
            if not request.ticks:
                self._quarantine(request, request.ending)
        elif token is not None:
            self.reply(request, token)
            self.emit(FirstToken(request.key.room, self._encoder.encode(token)))
            self.move(request, INFLIGHT)

    def maintain(self) -> None:
        """Pages are given with the first chunk; nothing else waits for them."""

    def ready(self) -> int:
        return len(self.states[WAITING]) + len(self._unfinished())

    def queued_tokens(self) -> int:
        waiting = (*self.states[BOOTSTRAPPING].values(), *self.states[WAITING].values(), *self._unfinished())
        return sum(request.prompt_len - request.computed for request in waiting)

    def plan(self, rows: int) -> list[Share]:
        shares: list[Share] = []
        budget = self.config.chunk_size
        for request in self._unfinished():
            if budget == 0 or len(shares) == rows:
                return shares
            shares.append(self._share(request, budget))
            budget -= shares[-1].count
        free = self.leases.pool.free
        for request in self.states[WAITING].values():
            need = self.pages_for(request.prompt_len)
            if budget == 0 or len(shares) == rows or need > free:
                break
            free -= need
            shares.append(self._share(request, budget))
            budget -= shares[-1].count
        return shares

    def make_row(self, request: Request, share: Share) -> Row:
        if request.state == WAITING:
            lease = self.leases.open(request.key, self.pages_for(request.prompt_len), REQUEST, SENDER)
            self.digest.note("pages", request.key.request, request.key.attempt, lease.pages)
            self.move(request, RUNNING)
            self.emit(StartSender(request.key.room, lease.pages))
        self.counters["prompt_tokens_computed"] += share.count
        end = share.start + share.count
        sample = request.sample(self.config.eos_ids) if end == request.prompt_len else None
        pages = self.leases.get(request.key).pages
        return Row(request.key, share.start, request.spec.prompt[share.start : end], pages, sample)

    def _unfinished(self) -> list[Request]:
        """Running prompts with chunks still to launch, oldest first."""
        running = self.states[RUNNING].values()
        return [r for r in running if r.ending is None and r.computed < r.prompt_len]

    @staticmethod
    def _share(request: Request, budget: int) -> Share:
        return Share(request.key, request.computed, min(budget, request.prompt_len - request.computed))

    def _quarantine(self, request: Request, outcome: Outcome) -> None:
        """The sender may still read the pages: they wait for the release verdict."""
        assert request.state in (RUNNING, INFLIGHT) and not request.ticks
        self.leases.drop(request.key, REQUEST)
        self.start_aborting(request, outcome)
