"""Planted bugs in who may have which pages, and when: see `sim.mutations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import decode.scheduler
from decode.lifecycle import GRANTED, SPILLING
from decode.scheduler import DecodeReplica
from pipeline.effects import Effect, StartSender
from pipeline.lease import REQUEST, SENDER, WRITER, Holder, LeaseBook, copy_holder
from pipeline.local import Observation
from pipeline.outcome import Outcome
from pipeline.planner import Row, Share
from pipeline.rank import RankCore
from pipeline.replica import Replica
from pipeline.request import Request
from prefill.lifecycle import RUNNING, WAITING
from prefill.scheduler import PrefillReplica

Patches = list[tuple[object, str, Any]]


def free_before_fence() -> Patches:
    original = DecodeReplica._quarantine

    def quarantine(self: DecodeReplica, request: Request, outcome: Outcome) -> None:
        self.leases.drop(request.key, WRITER)
        original(self, request, outcome)

    return [(DecodeReplica, "_quarantine", quarantine)]


def free_source_early() -> Patches:
    original = PrefillReplica._quarantine

    def quarantine(self: PrefillReplica, request: Request, outcome: Outcome) -> None:
        self.leases.drop(request.key, SENDER)
        original(self, request, outcome)

    return [(PrefillReplica, "_quarantine", quarantine)]


def no_tick_holder() -> Patches:
    hold, on_abort = LeaseBook.hold, DecodeReplica.on_abort

    def held(self: LeaseBook, key: Any, holder: Holder) -> None:
        if holder[0] != "tick":
            hold(self, key, holder)

    def abort(self: DecodeReplica, request: Request, outcome: Outcome) -> None:
        on_abort(self, request, outcome)
        if request.ticks and request.ending is not None:
            self.leases.drop(request.key, REQUEST)

    return [(LeaseBook, "hold", held), (DecodeReplica, "on_abort", abort)]


def free_before_copied() -> Patches:
    original = DecodeReplica._make_room

    def make_room(self: DecodeReplica) -> None:
        original(self)
        for request in self.states[SPILLING].values():
            self.leases.drop(request.key, copy_holder(request.stage_seq))
            self.leases.drop(request.key, REQUEST)

    return [(DecodeReplica, "_make_room", make_room)]


def half_prefilled() -> Patches:
    def plan(self: PrefillReplica, rows: int) -> list[Share]:
        shares: list[Share] = []
        budget, free = self.config.chunk_size, self.leases.pool.free
        for request in [*self._unfinished(), *self.states[WAITING].values()]:
            if budget == 0 or len(shares) == rows:
                break
            share = self._share(request, min(budget, max(1, self.config.chunk_size // 2)))
            held = len(self.leases.get(request.key).pages) if request.state == RUNNING else 0
            need = self.pages_for(share.start + share.count) - held
            if need > free:
                continue
            free, budget = free - need, budget - share.count
            shares.append(share)
        return shares

    def make_row(self: PrefillReplica, request: Request, share: Share) -> Row:
        end = share.start + share.count
        if request.state == WAITING:
            self.leases.open(request.key, self.pages_for(end), REQUEST, SENDER)
            self.move(request, RUNNING)
        else:
            more = self.pages_for(end) - len(self.leases.get(request.key).pages)
            if more:
                self.leases.grow(request.key, more)
        pages = self.leases.get(request.key).pages
        if end == request.prompt_len:
            self.emit(StartSender(request.key.room, pages))
        sample = request.sample(self.config.eos_ids) if end == request.prompt_len else None
        return Row(request.key, share.start, request.spec.prompt[share.start : end], pages, sample)

    return [(PrefillReplica, "plan", plan), (PrefillReplica, "make_row", make_row)]


def arrival_order() -> Patches:
    observe, allocate = RankCore.observe, DecodeReplica._allocate

    def observed(self: RankCore, observation: Observation) -> list[Effect]:
        if observation.topic == "prealloc":
            self.replica.__dict__.setdefault("arrived", {}).setdefault(observation.room, len(self.replica.__dict__))
            arrived = self.replica.__dict__["arrived"]
            arrived[observation.room] = len(arrived)
        return observe(self, observation)

    def allocated(self: DecodeReplica) -> None:
        arrived = self.__dict__.get("arrived", {})
        granted = self.states[GRANTED]
        ordered = sorted(granted.items(), key=lambda item: arrived.get(item[0].room, 0))
        granted.clear()
        granted.update(ordered)
        allocate(self)

    return [(RankCore, "observe", observed), (DecodeReplica, "_allocate", allocated)]


def maintain_in_launch() -> Patches:
    maintain, launch = DecodeReplica.maintain, Replica.launch

    def launched(self: Replica, item: Any) -> list[Effect]:
        if isinstance(self, DecodeReplica):
            maintain(self)
        return launch(self, item)

    return [(DecodeReplica, "maintain", lambda self: None), (Replica, "launch", launched)]


def any_victim() -> Patches:
    def choose(needy: Request, candidates: Sequence[Request]) -> Request | None:
        return candidates[0] if candidates else None

    return [(decode.scheduler, "choose_victim", choose)]
