"""One epoch of an instance: its rank processes from birth to the last one reaped.

In: what ranks say on the control channel, and their exits. Out: progress, a call when all are ready,
and one `Failure` if anything goes wrong. Invariants: the ranks live and die together: the first that
exits, says `Failing`, or falls silent ends the epoch, and `end` returns only when every process that can
be reached is reaped (those of a lost host are waited for by `Hosts.ready`). Nothing here restarts anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.io import control
from pipeline.io.control import RankConfig, StatusReport, ToDaemon, ToRank
from pipeline.io.control_socket import ControlSocket
from pipeline.io.hosts import Launch, RankProcess
from pipeline.io.instance_config import EpochPlan
from pipeline.io.timeline import RankTimeline

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.5  # how long a failing instance may still say and write down why
STATUS_PATIENCE_S = 2.0
DUMP_PATIENCE_S = 10.0  # for a file of some megabytes on a busy disk
SILENT_S = 2.5  # ranks speak every second
_REAP_PATIENCE_S = 60.0


class Unkillable(Exception):
    """A killed rank did not end; nothing may run in its place."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an epoch ended. `during_start`: before this rank was ready; `by_signal`: something killed it."""

    rank: int
    reason: str
    during_start: bool
    by_signal: bool


@dataclass(slots=True)
class RankView:
    """What the daemon knows of one rank."""

    config: RankConfig
    child: RankProcess
    heard: float  # monotonic; last time it said anything
    fraction: float = 0.0
    text: str = "starting"
    pages: int = 0
    ready: control.Ready | None = None
    failing: str = ""
    applied_seq: int = 0
    last_tick: int = 0
    executing: str = ""
    report: StatusReport | None = None

    @property
    def place(self) -> str:
        """Where in the log it was, as far as it has told."""
        executing = f", in {self.executing}" if self.executing else ""
        return f"at seq {self.applied_seq}, last launched tick {self.last_tick}{executing}"


@dataclass(slots=True)
class _Round:
    """A question to every rank, and who has not answered it."""

    token: int
    missing: set[int] = field(default_factory=set)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    dumps: dict[int, control.Dumped] = field(default_factory=dict)

    def answered(self, rank: int, token: int) -> bool:
        """False: that was the answer to another question."""
        if token == self.token:
            self.missing.discard(rank)
            if not self.missing:
                self.complete.set()
        return token == self.token


@dataclass(slots=True)
class _TimelineRound:
    token: int
    told: dict[int, RankTimeline] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Incarnation:
    def __init__(
        self, plan: EpochPlan, launch: Launch, load_timeout: float, on_tokens: Callable[[control.Tokens], None],
        on_ended: Callable[[control.Ended], None],
        on_progress: Callable[[control.Alive], None],
    ) -> None:  # fmt: skip
        """Starts the ranks. Raises `OSError` if that cannot be."""
        first = plan.ranks[0]
        self.epoch, self.pages, self.backend = first.epoch, 0, ""
        self.ready = asyncio.Event()
        self.failure: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self.diverged = False  # a rank stopped because it and its predecessor no longer agreed
        self.unexpected = 0  # well-formed messages that make no sense here and now
        self.ranks: list[RankView] = []
        self._ring_timeout, self._load_timeout = first.ring_timeout, load_timeout
        self._on_tokens, self._on_ended, self._on_progress = on_tokens, on_ended, on_progress
        self._configured, self._leaving = False, False
        self._round, self._round_task = _Round(0), None  # type: tuple[_Round, asyncio.Task[None] | None]
        self._dump_round, self._one_dump = _Round(0), asyncio.Lock()
        self._timeline, self._timeline_turn = _TimelineRound(0), asyncio.Lock()
        # An attempt sends at most Submit and Cancel, so a rank that reads at all never fills this.
        outbox = 2 * first.max_queue + 64
        near = [config.rank for config in plan.ranks if config.control == plan.near]
        far = [config.rank for config in plan.ranks if config.control != plan.near]
        self._sockets = [ControlSocket(plan.near, near, outbox, self._on_message)]
        try:
            if far:
                self._sockets.append(ControlSocket(plan.far, far, outbox, self._on_message, plan.far_lock))
            for config in plan.ranks:
                child = launch(config, self._on_exit)
                self.ranks.append(RankView(config, child, time.monotonic()))
        except BaseException:
            for view in self.ranks:
                view.child.kill()
            for socket in self._sockets:
                socket.close()
            raise
        self._socket_of = {rank: socket for socket in self._sockets for rank in socket.ranks}
        self._period = min(1.0, self._ring_timeout / 4)
        self._watch_due = time.monotonic() + self._period
        self._watch = asyncio.get_running_loop().call_later(self._period, self._look_for_silence)

    @property
    def frames_dropped(self) -> int:
        return sum(socket.dropped.total() for socket in self._sockets) + self.unexpected

    def progress(self) -> str:
        """How far start-up is, for people."""
        return ", ".join(f"rank {view.config.rank} {view.text} {view.fraction:.0%}" for view in self.ranks)

    def send(self, rank: int, message: ToRank) -> bool:
        return self._socket_of[rank].send(rank, message)

    def must_send(self, rank: int, message: ToRank) -> None:
        """As `send`; a rank that cannot take it has failed."""
        if not self.send(rank, message):
            self._fail(rank, "does not read its control channel")

    async def ask_status(self) -> set[int]:
        """Fresh reports of all ranks, within `STATUS_PATIENCE_S`; returns the ranks that did not answer."""
        if self._round_task is None or self._round_task.done():  # concurrent callers share one question
            self._round = _Round(self._round.token + 1, set(range(len(self.ranks))))
            self._round_task = asyncio.create_task(self._ask(self._round))
        current = self._round
        await asyncio.shield(self._round_task)
        return current.missing

    async def dump_flight(self, reason: str) -> dict[int, control.Dumped]:
        """Every rank writes its flight recorder and goes on; what those say that answer in `DUMP_PATIENCE_S`."""
        async with self._one_dump:  # a dump holds up its rank for a moment: never two at once
            current = self._dump_round = _Round(self._dump_round.token + 1, set(range(len(self.ranks))))
            silent = self.tell_all(control.Dump(current.token, reason))
            if len(silent) < len(self.ranks) and not self._leaving:
                with suppress(TimeoutError):
                    async with asyncio.timeout(DUMP_PATIENCE_S):
                        await current.complete.wait()
            return current.dumps

    def tell_all(self, message: ToRank) -> list[int]:
        """Returns the ranks that cannot take it. Not before `ready`: a starting rank would trip over it."""
        return [view.config.rank for view in self.ranks if not self.send(view.config.rank, message)]

    async def _ask(self, current: _Round) -> None:
        reached = 0
        if self.ready.is_set():  # before, a rank takes `Configure` and `Go` in turn and would trip over a question
            reached = sum(self.send(view.config.rank, control.AskStatus(current.token)) for view in self.ranks)
        try:
            async with asyncio.timeout(STATUS_PATIENCE_S if reached else 0):
                await current.complete.wait()
        except TimeoutError:
            pass

    async def ask_timeline(self, seconds: float) -> dict[int, RankTimeline]:
        """What the ranks did in the last `seconds`, of those that answer within `STATUS_PATIENCE_S`."""
        async with self._timeline_turn:
            if not self.ready.is_set():
                return {}
            current = self._timeline = _TimelineRound(self._timeline.token + 1)
            question = control.AskTimeline(current.token, seconds)
            asked = [self.send(view.config.rank, question) for view in self.ranks]
            if any(asked):
                with suppress(TimeoutError):
                    async with asyncio.timeout(STATUS_PATIENCE_S):
                        await current.complete.wait()
            return current.told

    async def leave(self, patience: float) -> None:
        """Asks every rank to quit and gives them `patience` seconds; what is left is for `end`."""
        self._leaving = True
        for view in self.ranks:
            self.send(view.config.rank, control.Quit())
        try:
            async with asyncio.timeout(patience):
                for view in self.ranks:
                    await view.child.exited.wait()
        except TimeoutError:
            pass

    async def last_words(self, failure: Failure) -> Failure:
        """The failure with all that the ranks could still say about it."""
        cause = self.ranks[failure.rank]
        if not failure.by_signal:
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    await cause.child.exited.wait()
            except TimeoutError:
                pass
            self._drain_now()
        said = [failure.reason]
        if cause.failing and cause.failing not in failure.reason:
            said.append(cause.failing)
        elif not cause.failing and cause.child.last_lines and not failure.by_signal:
            said.append(f"its last line: {cause.child.last_lines[-1]}")
        said.append(cause.place)
        now = time.monotonic()
        # A neighbour notices a stuck rank, but only silence tells which one it is.
        mute = [view for view in self.ranks if view is not cause and view.ready and now - view.heard > SILENT_S]
        said += [f"rank {v.config.rank} has been silent for {now - v.heard:.1f} s, {v.place}" for v in mute]
        others = [f"rank {v.config.rank} says: {v.failing}" for v in self.ranks if v.failing and v is not cause]
        text = f"rank {failure.rank} " + "; ".join(said + others)
        return Failure(failure.rank, text[:1000], failure.during_start, failure.by_signal)

    async def end(self) -> None:
        """Kills and reaps every rank, then takes in what they had already sent. Raises `Unkillable`."""
        self._leaving = True
        for question in (self._round, self._dump_round, self._timeline):
            question.complete.set()  # nobody answers any more
        self._watch.cancel()
        for view in self.ranks:
            view.child.kill()
        for view in self.ranks:
            if not await view.child.reap(_REAP_PATIENCE_S):
                raise Unkillable(f"rank {view.config.rank} (pid {view.child.pid}) did not end "
                                 f"{_REAP_PATIENCE_S:.0f} s after SIGKILL; it may still write to peers")  # fmt: skip
        self._drain_now()
        for socket in self._sockets:
            socket.close()

    def _drain_now(self) -> None:
        for socket in self._sockets:
            socket.drain_now()

    def _fail(self, rank: int, reason: str, by_signal: bool = False) -> None:
        if not self._leaving and not self.failure.done():
            during_start = self.ranks[rank].ready is None
            self.failure.set_result(Failure(rank, reason, during_start, by_signal))

    def _on_exit(self, rank: int) -> None:
        status = self.ranks[rank].child.exit_status()
        self._drain_now()  # it may have said why
        self._fail(rank, status, by_signal=self.ranks[rank].child.was_killed())

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        late = now - self._watch_due
        self._watch_due = now + self._period
        self._watch = asyncio.get_running_loop().call_later(self._period, self._look_for_silence)
        self._drain_now()
        bound = self._ring_timeout if self.ready.is_set() else self._load_timeout
        for view in self.ranks:
            if late > self._period:
                view.heard += late  # this process itself stood still; that is not the ranks' fault
            if (silent := now - view.heard) > bound:
                self._fail(view.config.rank, f"was silent for {silent:.1f} s (limit {bound:g} s) and counts as stuck")

    def _on_message(self, rank: int, message: ToDaemon) -> None:
        if rank >= len(self.ranks):
            return
        view = self.ranks[rank]
        view.heard = time.monotonic()
        match message:
            case control.Alive():
                view.applied_seq, view.last_tick = message.applied_seq, message.last_tick
                view.executing = message.executing
                if rank == 0:
                    self._on_progress(message)
            case control.Tokens() if rank == 0:
                self._on_tokens(message)
            case control.Ended() if rank == 0:
                self._on_ended(message)
            case control.StatusReport():
                self._take_report(view, message)
            case control.Dumped():
                if self._dump_round.answered(rank, message.token):
                    self._dump_round.dumps[rank] = message
            case control.TimelineReport():
                if message.token == self._timeline.token:
                    self._timeline.told[rank] = message.timeline
                    if len(self._timeline.told) == len(self.ranks):
                        self._timeline.complete.set()
            case control.Loading() if view.ready is None:
                view.fraction, view.text = min(max(message.fraction, 0.0), 1.0), message.text[:200]
            case control.Capacity() if not view.pages:
                self._take_capacity(view, message)
            case control.Ready() if self._configured and view.ready is None:
                view.ready, view.fraction, view.text = message, 1.0, "ready"
                if all(other.ready for other in self.ranks):
                    self._go()
            case control.Failing():
                view.failing = message.reason[:500]
                self.diverged = self.diverged or message.diverged
                self._fail(rank, f"failed: {view.failing}")
            case _:
                self.unexpected += 1
                log.warning("unexpected %s from rank %d", type(message).__name__, rank)

    def _take_report(self, view: RankView, report: StatusReport) -> None:
        view.report = report
        self._round.answered(view.config.rank, report.token)

    def _take_capacity(self, view: RankView, message: control.Capacity) -> None:
        if message.pages < 1:
            budget = view.config.pages or f"{view.config.kv_bytes} bytes"
            self._fail(view.config.rank, f"can hold no page of KV (asked for {budget})")
            return
        view.pages = message.pages
        if all(other.pages for other in self.ranks):
            self._configured = True
            self.pages = min(other.pages for other in self.ranks)
            for other in self.ranks:
                self.must_send(other.config.rank, control.Configure(self.pages))

    def _go(self) -> None:
        backends = [view.ready.transfer_backend for view in self.ranks if view.ready]
        for rank, backend in enumerate(backends):
            if backend != backends[0]:
                self._fail(rank, f"chose transfer backend {backend!r}, but rank 0 chose {backends[0]!r}")
                return
        self.backend = backends[0]
        for view in self.ranks:
            view.heard = time.monotonic()
            self.must_send(view.config.rank, control.Go())
        self.ready.set()
