"""Keeps an instance alive: starts its ranks, and starts them all again when one fails.

In: configuration and what operators ask: drain, resume, stop. Out: the instance's phase, its epoch, and the exit code.
Invariants: the ranks of an epoch are all reaped before any attempt is told that it failed, but for those of a
lost host, and all are dead before the next epoch starts; epochs only grow and are on disk first; every failure
has a reason that reaches the log, the open attempts and `Status`. A rank that cannot take its model ends the daemon.
A drain outlives the ranks: those of the next epoch take nothing either until it is resumed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from consensus.entry import Key, RequestSpec
from pipeline.io import control
from pipeline.io.attempts import Attempts
from pipeline.io.drain import Drain
from pipeline.io.hosts import Hosts
from pipeline.io.incarnation import Failure, Incarnation, Unkillable
from pipeline.io.instance_config import DaemonConfig, ModelFacts, plan_epoch
from pipeline.io.run_folder import RunFolder, RunFolderError
from pipeline.workload import Speed, Workload

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_HEALTHY_AFTER_S = 60.0
_QUIT_GRACE_S = 3.0


class Phase(StrEnum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"  # ranks finish what they have and take nothing new
    RESTARTING = "restarting"
    STOPPING = "stopping"


class Stopping(Exception):
    """The instance ends, and nothing can change that; the message says why."""


class Supervisor:
    def __init__(self, config: DaemonConfig, facts: ModelFacts, hosts: Hosts, folder: RunFolder) -> None:
        """Raises `RunFolderError`."""
        self.config, self.facts = config, facts
        self.phase = Phase.LOADING
        self.restarts = self.divergences = 0
        self.last_failure = ""
        self.stalled = ""  # what keeps a serving instance from getting on, for people
        self.workload, self.speed = Workload(), Speed()  # as rank 0 last told
        self.incarnation: Incarnation | None = None
        self.attempts = Attempts(config.max_queue, config.stream_buffer, self._cancel)
        self.draining = Drain(config.instance, self.attempts)
        self.log_levels: dict[str, str] = {}  # logger → what ranks of every epoch are told
        self.on_phase: Callable[[Phase], None] = lambda phase: None
        self.on_ready: Callable[[], None] = lambda: None
        self._hosts, self._folder = hosts, folder
        self.epoch = folder.last_epoch()  # until every rank of it is known to be dead, the next has no number
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._pause = asyncio.Event()
        self._pause_reason = ""
        self._pause_drains = False  # the drain under way is the pause's
        self._hurry = asyncio.Event()
        self._last_start_failure = ""

    @property
    def serving(self) -> bool:
        return self.phase is Phase.SERVING

    @property
    def sent_away(self) -> bool:
        """Takes nothing new because somebody said so, not because anything failed."""
        return self.draining.active or self._stop.is_set()

    @property
    def pages(self) -> int:
        return self.incarnation.pages if self.incarnation else 0

    def not_serving_reason(self) -> str:
        """For people; empty while serving."""
        match self.phase:
            case Phase.SERVING:
                return ""
            case Phase.STOPPING:
                return f"{self.config.instance} is stopping: {self._stop_reason}"
            case Phase.DRAINING:
                return f"{self.config.instance} is draining: {self.draining.reason}"
            case Phase.LOADING:
                reason = f"{self.config.instance} is loading"
            case Phase.RESTARTING:
                reason = f"{self.config.instance} is restarting after: {self.last_failure}"
        more = self.incarnation.progress() if self.incarnation else self._hosts.waiting()
        return f"{reason}; {more}" if more else reason

    def submit(self, spec: RequestSpec) -> None:
        """Gives an opened attempt to rank 0. If that fails, so does the instance, and the attempt with it."""
        if self.incarnation is not None:
            self.incarnation.must_send(0, control.Submit(spec))

    def drain(self, reason: str, patience: float) -> None:
        """Takes nothing new until `resume`; what is open gets `patience` seconds. Raises `Stopping`."""
        self._refuse_if_stopping()
        self._pause_drains = False  # also one that a pause began is the operator's now, and outlives the epoch
        self.draining.begin(reason, patience)
        if self.phase is Phase.SERVING:
            self._enter(Phase.DRAINING)

    def resume(self) -> None:
        """Undoes a drain. Raises `Stopping`."""
        self._refuse_if_stopping()
        if self._pause.is_set():  # this epoch ends all the same, and empties itself first; the next one serves
            self._pause_drains = True
            return
        if self.draining.active:
            log.info("resumed: no drain any more")
        self.draining.end()
        if self.phase is Phase.DRAINING:
            self._enter(Phase.SERVING)

    def stop(self, reason: str) -> None:
        """The first call drains the instance and ends it, the second ends it at once."""
        if self._stop.is_set():
            self._hurry.set()
            return
        self._stop_reason = reason
        # A drain under way may have less time left than a stop gives, and keeps it.
        left = self.draining.remaining if self.draining.active else self.config.drain_timeout
        self.draining.begin(reason, min(left, self.config.drain_timeout))
        if self.phase is Phase.SERVING:
            self._enter(Phase.DRAINING)
        self._stop.set()

    def pause(self, reason: str) -> None:
        """As the first `stop`, but of this epoch alone: the next one starts when all hosts are there."""
        if self.incarnation is None or self._stop.is_set() or self._pause.is_set():
            return
        self._pause_reason = reason
        if not self.draining.active:  # an operator's drain goes on as it is, also in the next epoch
            self._pause_drains = True
            self.draining.begin(reason, self.config.drain_timeout)
        if self.phase is Phase.SERVING:
            self._enter(Phase.DRAINING)
        self._pause.set()

    def _refuse_if_stopping(self) -> None:
        if self._stop.is_set():
            raise Stopping(f"{self.config.instance} is stopping: {self._stop_reason}")

    async def run(self) -> int:
        """Serves until stopped (0) or given up (1)."""
        backoff = _FIRST_BACKOFF_S
        self._hosts.epoch_over()
        try:
            while True:
                if not await self._gathered():
                    return 0
                self.epoch = self._folder.next_epoch(max(self.config.first_epoch, self._hosts.epoch_floor() + 1))
                started = time.monotonic()
                failure = await self._run_epoch()
                self._hosts.epoch_over()
                if self._stop.is_set():
                    return 0
                self._pause.clear()
                if self._pause_drains:
                    self._pause_drains = False
                    self.draining.end()
                if failure is None:
                    self.restarts += 1
                    continue
                if self._is_hopeless(failure):
                    log.error("giving up: %s twice in a row while starting", failure.reason)
                    return 1
                if time.monotonic() - started > _HEALTHY_AFTER_S:
                    backoff = _FIRST_BACKOFF_S
                self.restarts += 1
                log.warning("starting again in %.1f s", backoff)
                if await self._stopped_within(backoff):
                    return 0
                backoff = min(2 * backoff, _LONGEST_BACKOFF_S)
        except (Unkillable, RunFolderError, OSError) as error:  # the last: ranks cannot be started
            log.error("giving up: %s", error)
            return 1
        finally:
            self._enter(Phase.STOPPING)
            self.draining.end()
            self.attempts.fail_all(f"{self.config.instance} is gone: {self._stop_reason or self.last_failure}")

    async def _gathered(self) -> bool:
        """Waits until the next epoch may start; False: stopped meanwhile."""
        while self._hosts.waiting() and not self._stop.is_set():
            ready, stopped = asyncio.create_task(self._hosts.ready()), asyncio.create_task(self._stop.wait())
            await _first_of(ready, stopped)
            ready.cancel()
            stopped.cancel()
        return not self._stop.is_set()

    async def _run_epoch(self) -> Failure | None:
        """One epoch from birth to the last rank reaped; the failure that ended it, or None if it was to end."""
        log.info("[%s] epoch %d: starting %d ranks", self.config.instance, self.epoch, self.config.pp_size)
        self._folder.open_epoch(self.epoch)
        plan = plan_epoch(self.config, self.facts, self._hosts.of_ranks(self.epoch), self.epoch)
        current = Incarnation(
            plan, self._hosts.launch, self.config.load_timeout, self.attempts.tokens, self.attempts.ended,
            self._see_progress,
        )  # fmt: skip
        self.incarnation = current
        failure = None
        serving = asyncio.create_task(self._serve_when_ready(current))
        stopped, paused = asyncio.create_task(self._stop.wait()), asyncio.create_task(self._pause.wait())
        try:
            await _first_of(current.failure, stopped, paused)
            if stopped.done() or (paused.done() and not current.failure.done()):
                await self._leave(current)
            if current.failure.done() and not self._stop.is_set():  # also while it emptied itself
                first = current.failure.result()
                # Said already while the last words are waited for.
                self.last_failure = f"rank {first.rank} {first.reason}"
                self._enter(Phase.RESTARTING)  # nothing new comes in from here on
                failure = await current.last_words(first)
        finally:
            serving.cancel()
            stopped.cancel()
            paused.cancel()
            await asyncio.shield(current.end())
            self.incarnation = None
            self._folder.close_epoch(self.epoch)
        if failure is not None:
            self.last_failure = failure.reason
            self.divergences += current.diverged
            ended = self.attempts.fail_all(f"{self.config.instance} (epoch {self.epoch}): {failure.reason}")
            log.error("epoch %d failed, all ranks are ended, %d open attempts: %s", self.epoch, ended, failure.reason)
        elif not self._stop.is_set():
            # Those let go whose end rank 0 did not tell in time: nobody is left who could.
            self.attempts.fail_all(f"{self.config.instance} (epoch {self.epoch}): {self._pause_reason}")
        return failure

    async def _serve_when_ready(self, current: Incarnation) -> None:
        await current.ready.wait()
        if not current.failure.done() and not self._stop.is_set() and not self._pause.is_set():
            self.workload = Workload(free_pages=current.pages)
            for logger, level in self.log_levels.items():
                current.tell_all(control.SetLogLevel(logger, level))
            self._enter(Phase.DRAINING if self.draining.active else Phase.SERVING)
            self.on_ready()

    async def _leave(self, current: Incarnation) -> None:
        """Nothing new comes in; the instance empties itself, and the ranks are asked to quit."""
        orderly = asyncio.create_task(self._leave_in_order(current))
        hurry = asyncio.create_task(self._hurry.wait())
        await _first_of(orderly, hurry, current.failure)
        orderly.cancel()
        hurry.cancel()

    async def _leave_in_order(self, current: Incarnation) -> None:
        await self.draining.done()
        if self._stop.is_set():
            self._enter(Phase.STOPPING)
            log.info("stopping: %s", self._stop_reason)
        else:
            self.last_failure = self._pause_reason
            self._enter(Phase.RESTARTING)
            log.info("ending epoch %d: %s", self.epoch, self._pause_reason)
        await current.leave(_QUIT_GRACE_S)

    def _is_hopeless(self, failure: Failure) -> bool:
        """Twice in a row the same refusal at start: a third try would end the same way."""
        if not failure.during_start or failure.by_signal:
            self._last_start_failure = ""
            return False
        without_numbers = re.sub(r"\d+", "#", failure.reason)  # times and process ids differ, the reason does not
        again = without_numbers == self._last_start_failure
        self._last_start_failure = without_numbers
        return again

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True

    def _cancel(self, key: Key, reason: str) -> None:
        if self.incarnation is not None:
            self.incarnation.must_send(0, control.Cancel(key, reason))

    def _see_progress(self, alive: control.Alive) -> None:
        """Health is progress, not a process that is up: it follows what rank 0 says of its oldest tick."""
        self.workload = alive.workload
        self.speed.note(time.monotonic(), alive.workload)
        before, self.stalled = self.stalled, alive.doing if alive.stalled > self.config.progress_timeout else ""
        if bool(before) != bool(self.stalled):
            log.warning("%s", f"no progress: {self.stalled}" if self.stalled else "progress again")
            self.on_phase(self.phase)

    def _enter(self, phase: Phase) -> None:
        if self.phase is not phase:
            self.phase, self.stalled = phase, ""
            self.on_phase(phase)


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
