"""Decode's scheduler: who gets pages, who is in the next batch, and what the log's events mean.

Invariants: pages come in log order, and the first attempt that does not fit stops the rest; an attempt
gets pages for its prompt and for all it may generate, so a running request never waits for a page; it
is in at most one tick at a time; turns go round, so that none starves when not all fit into a batch.
"""

from __future__ import annotations

import msgspec

from consensus.entry import PREALLOC, TRANSFER, Admission, Key, RequestSpec, TokenOut
from decode.lifecycle import GRANTED, PREALLOCATING, READY, RUNNING, TIMED, TOPICS, TRANSFERRING, TRANSITIONS
from pipeline.effects import SendDestinations, StopRoom
from pipeline.lease import REQUEST, WRITER
from pipeline.outcome import ERROR, Outcome
from pipeline.planner import Row, Share
from pipeline.replica import Replica, ReplicaConfig
from pipeline.request import Request


class DecodeReplica(Replica):
    first_state = PREALLOCATING
    transitions = TRANSITIONS
    topics = TOPICS
    timed = TIMED
    uses_store = False

    def __init__(self, config: ReplicaConfig) -> None:
        super().__init__(config)
        self._turn: dict[Key, None] = {}  # who may be in the next batch, in order of their turn
        self._decoder = msgspec.msgpack.Decoder(TokenOut)

    def refuse(self, spec: RequestSpec) -> str:
        need = self._need(len(spec.prompt), spec.params.max_tokens)
        if need > self.config.pages:
            return f"prompt and max_tokens need {need} pages, the pool has {self.config.pages}"
        return ""

    def on_admission(self, request: Request, admission: Admission) -> None:
        raise AssertionError("the store decides nothing on the decode side")

    def on_abort(self, request: Request, outcome: Outcome) -> None:
        if request.state in (PREALLOCATING, GRANTED):
            self.end(request, outcome)
            self.emit(StopRoom(request.key.room, outcome.reason))
            self.finish(request)
        elif request.state == TRANSFERRING:
            self._quarantine(request, outcome)
        elif request.ticks:
            request.ending = outcome
        else:
            self._complete(request, outcome)

    def on_good(self, request: Request, topic: str, payload: bytes) -> None:
        if topic == PREALLOC:
            self.move(request, GRANTED)
            return
        self.leases.drop(request.key, WRITER)
        if topic == TRANSFER:
            self._receive(request, self._decoder.decode(payload))
        else:
            self.finish(request)

    def on_bad(self, request: Request, topic: str, reason: str) -> None:
        if topic == PREALLOC:
            self.on_abort(request, Outcome(ERROR, f"handshake with prefill failed: {reason}", 0, True))
        else:
            assert topic == TRANSFER, "a fence cannot fail"
            self._quarantine(request, Outcome(ERROR, f"KV transfer failed: {reason}", 0, True))

    def on_harvest(self, request: Request, row: Row, token: TokenOut | None) -> None:
        assert token is not None, "every decode row yields a token"
        if request.ending is not None:
            self._complete(request, request.ending)
            return
        self.counters["tokens_generated"] += 1
        self.reply(request, token)
        self._go_on(request)

    def maintain(self) -> None:
        for request in list(self.states[GRANTED].values()):
            need = self._need(request.prompt_len, request.params.max_tokens)
            if not self.leases.fits(need):
                break
            lease = self.leases.open(request.key, need, REQUEST, WRITER)
            self.digest.note("pages", request.key.request, request.key.attempt, lease.pages)
            self.move(request, TRANSFERRING)
            self.emit(SendDestinations(request.key.room, lease.pages[: self.pages_for(request.prompt_len)]))

    def role_state(self) -> list[Key]:
        return list(self._turn)

    def restore_role(self, state: list[Key]) -> None:
        self._turn = dict.fromkeys(state)

    def ready(self) -> int:
        return len(self._turn)

    def plan(self, rows: int) -> list[Share]:
        shares: list[Share] = []
        for key in self._turn:
            if len(shares) == rows:
                break
            request = self.requests[key]
            shares.append(Share(key, request.prompt_len + len(request.output) - 1, 1))
        return shares

    def make_row(self, request: Request, share: Share) -> Row:
        del self._turn[request.key]
        if request.state == READY:
            self.move(request, RUNNING)
        pages = self.leases.get(request.key).pages
        return Row(request.key, share.start, (request.output[-1],), pages, request.sample(self.config.eos_ids))

    def _need(self, prompt_len: int, max_tokens: int) -> int:
        # The last token that can be generated is never run, so its KV needs no place.
        return self.pages_for(min(prompt_len + max_tokens - 1, self.config.max_model_len))

    def _receive(self, request: Request, first: TokenOut) -> None:
        """All KV is here. The prefill side told the client the first token already; positions let it drop one."""
        request.computed = request.prompt_len
        self.reply(request, first)
        self.move(request, READY)
        self.close_room(request)
        self._go_on(request)

    def _go_on(self, request: Request) -> None:
        outcome = request.finish(self.config.eos_ids, self.config.max_model_len)
        if outcome is None:
            self._turn[request.key] = None
        else:
            self._complete(request, outcome)

    def _complete(self, request: Request, outcome: Outcome) -> None:
        """Ends an attempt whose pages nobody but it and its harvested ticks ever touch."""
        self._turn.pop(request.key, None)
        self.end(request, outcome)
        self.leases.drop(request.key, REQUEST)
        self.finish(request)

    def _quarantine(self, request: Request, outcome: Outcome) -> None:
        """Prefill may still write into the pages: they wait for the release verdict."""
        self.leases.drop(request.key, REQUEST)
        self.start_aborting(request, outcome)
