"""The course of one request: attempt after attempt, which to its reader are one.

In: a job, and the fleet as it changes. Out: batches of tokens, each token once, and last the `Finish`.
Invariants: one attempt at a time is listened to; an attempt that resumes is given all tokens delivered
so far, and only what follows them; the time of all attempts together is the request's; every attempt
is told to end. A failed attempt may still be ending elsewhere when the next one runs: attempts have
names of their own, so neither can be taken for the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.attempt import Attempt, Background, Batch
from gateway.config import GatewayConfig
from gateway.errors import timed_out, too_late, unavailable
from gateway.generation_job import Job
from gateway.instances import Pair, Side
from gateway.merge import Ending, Finish
from gateway.metrics import Metrics
from gateway.policies import Cost, Placing
from gateway.registry import Registry
from gateway.resume import Recovery, cause, ended_by_last, is_busy
from gateway.router import NoPair, Router
from gateway.terms import Terms

log = logging.getLogger("paceline.gateway")

# An instance counts a request's time in the steps of its log, so it may end one this much too early.
_CLOCK_SLACK_S = 0.1


@dataclass(frozen=True, slots=True)
class Means:
    """What the courses of all requests share."""

    config: GatewayConfig
    registry: Registry
    router: Router
    metrics: Metrics
    background: Background


class Course:
    def __init__(
        self, means: Means, request_id: str, job: Job, ending_ids: Sequence[int], terms: Terms, arrived: float
    ) -> None:
        """Starts the first attempt. Raises `ApiError` if no pair serves, none in time, or its time is over."""
        self.request_id = request_id
        self._means, self._job, self._ending_ids = means, job, ending_ids
        cost = Cost(len(job.prompt_ids), job.sampling.max_tokens)
        self._placing = Placing(cost, terms.session, job.prompt_ids)
        now = time.monotonic()
        self._deadline = arrived + min(means.config.request_timeout_s, terms.timeout_s)
        self._recovery = Recovery(means.config.resumes)
        self._over = asyncio.Event()  # the gateway ends it
        self._delivered: Sequence[int] = ()
        # Later attempts are not turned away: what they are about to answer is half told.
        pair = self._choose(trusted=False, patience_s=self._deadline - now)
        if isinstance(pair, NoPair):
            if pair.late_s > 0.0 and now >= self._deadline:
                raise timed_out("the request's time was over before anything could be done for it")
            if pair.late_s > 0.0:
                means.metrics.turned_away.inc()
                raise too_late(pair.reason, pair.late_s)
            raise unavailable(pair.reason)
        self._attempt = self._start(pair, now)

    @property
    def pair(self) -> Pair:
        """Where it runs now."""
        return self._attempt.pair

    async def next_batch(self) -> Batch:
        """Waits until something happened. The batch with the finish is the last."""
        batch = await self._next_batch()
        return batch if batch.finish is None else Batch(batch.tokens, self._judged(batch.finish))

    def _judged(self, finish: Finish) -> Finish:
        """Whatever an instance calls it: what fails when the request's time is over fails because it is over."""
        failed = finish.ending is Ending.FAILED and finish.status != "INVALID_ARGUMENT"
        if failed and time.monotonic() >= self._deadline - _CLOCK_SLACK_S:
            return replace(finish, status="DEADLINE_EXCEEDED")
        return finish

    async def _next_batch(self) -> Batch:
        while True:
            batch = await self._attempt.next_batch()
            if batch.finish is None or not batch.finish.retryable:
                return batch
            if batch.tokens:
                return Batch(batch.tokens, None)  # it will be asked again
            self._delivered = self._attempt.delivered
            ending = ended_by_last(self._job, self._ending_ids, self._delivered)
            if ending is not None:
                return Batch([], Finish(ending))
            failure = await self._resume(batch.finish)
            if failure is not None:
                return Batch([], failure)

    def satisfied(self, reason: str) -> None:
        """The gateway has all it needs (a stop string): the sides are told to stop and may say their outcome."""
        self._attempt.satisfied(reason)

    def cancel(self, reason: str, status: str = "CANCELLED") -> None:
        """Nobody waits any more, or waiting is over. No-op after the end."""
        self._over.set()
        self._attempt.cancel(reason, status)

    async def _resume(self, finish: Finish) -> Finish | None:
        """Starts the next attempt, or says why there is none."""
        failed, metrics = self._attempt.pair, self._means.metrics
        if not self._recovery.failed(failed, finish):
            pair: Pair | NoPair = NoPair(self._recovery.exhausted(finish))
        else:
            pair = self._choose(trusted=True)
            if isinstance(pair, NoPair):
                if is_busy(finish) and not self._delivered:
                    return finish  # nothing is lost: the client had better come back later
                pair = await self._wait_for_pair()
        if self._over.is_set():
            return Finish(Ending.FAILED, "the gateway is stopping", "UNAVAILABLE")
        if isinstance(pair, NoPair):
            metrics.given_up.labels(cause(finish)).inc()
            return Finish(Ending.FAILED, f"{finish.reason}; not resumed: {pair.reason}", finish.status)
        metrics.resumed(cause(finish), first=self._recovery.attempts == 1)
        log.log(
            logging.INFO if finish.draining else logging.WARNING,
            "%s resumes on %s and %s after %d tokens; attempt %d on %s and %s failed: %s",
            self.request_id,
            pair.prefill.instance_id,
            pair.decode.instance_id,
            len(self._delivered),
            self._attempt.number,
            failed.prefill.instance_id,
            failed.decode.instance_id,
            finish.reason,
        )
        self._attempt = self._start(pair, time.monotonic())
        return None

    def _choose(self, trusted: bool, patience_s: float = math.inf) -> Pair | NoPair:
        means, suspects = self._means, self._recovery.suspects
        return means.router.choose(means.registry.fleet, self._placing, time.monotonic(), suspects, trusted, patience_s)

    async def _wait_for_pair(self) -> Pair | NoPair:
        """Any pair, suspects included once they have been asked whether they still serve."""
        patience, left = self._means.config.resume_wait_s, self._deadline - time.monotonic()
        try:
            async with asyncio.timeout(min(patience, left)):
                await self._unless_over(self._ask_suspects())
                while isinstance(pair := self._choose(trusted=False), NoPair) and not self._over.is_set():
                    await self._unless_over(self._means.registry.change())
                return pair
        except TimeoutError:
            if left < patience:
                return NoPair(f"no pair came to serve within the {max(left, 0.0):.1f} s that were left of its time")
            return NoPair(f"no pair came to serve within {patience:g} s")

    async def _ask_suspects(self) -> None:
        await asyncio.sleep(self._recovery.pause_s)
        for instance in self._recovery.suspects:
            await self._means.registry.ask_again(instance)

    async def _unless_over(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Waits, but not beyond the end of the request."""
        tasks = [asyncio.create_task(waiting), asyncio.create_task(self._over.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _start(self, pair: Pair, now: float) -> Attempt:
        means = self._means
        entries = means.router.started(pair, self._placing, now)
        links = {side: means.registry.link(pair.of(side)) for side in Side}
        attempt = Attempt(
            request_id=self.request_id,
            number=self._recovery.attempts,
            pair=pair,
            links={side: link for side, link in links.items() if link is not None},
            config=means.config,
            background=means.background,
            on_side_end=lambda side: means.router.ended(entries[side]),
            on_broken=lambda side, unreachable: means.registry.failed(pair.of(side), unreachable),
            on_hand_over=lambda worked: means.router.handed_over(pair, worked, time.monotonic()),
        )
        means.metrics.attempts.inc()
        attempt.start(self._job, self._delivered, max(self._deadline - now, 0.001))
        return attempt
