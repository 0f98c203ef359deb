"""Runs one attempt of one request on a pair of instances.

In: a pair, links, a job, what earlier attempts delivered. Out: batches of merged tokens and, last, the
`Finish`. Invariants: both Generate calls end (by themselves, or cancelled within `drain_s` of the
finish), and `on_side_end` is called once per side when its call has. When the attempt fails, or is
ended early, both sides also get an Abort: a cancelled call may reach an instance late or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from gateway.config import GatewayConfig
from gateway.generation_job import Job
from gateway.instances import Pair, Side
from gateway.merge import Deliver, Ending, Event, Finish, Merge, Token
from gateway.request_watch import watch_call
from gateway.wire import Link, cancelled_by_us, generate_request, refused_for_draining, tell
from paceline_proto.v1 import generation_pb2

log = logging.getLogger("paceline.gateway")

# Later than the instances' own timeout, so that theirs, which names the stage, is the one told.
CALL_SLACK_S = 2.0
_ABORT_TIMEOUT_S = 2.0
ROOM_TOKEN_BYTES = 16


class Background:
    """Work that outlives the request it belongs to; nothing of it is lost or left behind at the end."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Batch:
    """What happened since the last batch."""

    tokens: list[Token]
    finish: Finish | None


@dataclass(slots=True)
class Attempt:
    request_id: str
    number: int
    pair: Pair
    links: dict[Side, Link]
    config: GatewayConfig
    background: Background
    on_side_end: Callable[[Side], None]
    on_broken: Callable[[Side, bool], None]  # a call failed for the instance's sake; True: it cannot be reached
    on_hand_over: Callable[[bool], None]  # the hand-over worked, or what failed was the hand-over
    _merge: Merge = field(default_factory=Merge)
    _tokens: list[Token] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _readers: dict[Side, asyncio.Task[None]] = field(default_factory=dict)
    _closing: bool = False
    _handed_over: bool = False

    @property
    def delivered(self) -> Sequence[int]:
        """Ids of all output tokens so far, those of earlier attempts included."""
        return self._merge.delivered

    def start(self, job: Job, delivered: Sequence[int], timeout_s: float) -> None:
        """Goes on behind the tokens that earlier attempts delivered."""
        self._merge = Merge(delivered, job.sampling.max_tokens)
        token = secrets.token_bytes(ROOM_TOKEN_BYTES)
        for side in Side:
            here, peer = self.pair.of(side), self.pair.of(side.other)
            request = generate_request(self.request_id, self.number, job, delivered, here, peer, timeout_s, token)
            reader = self.background.start(self._read(side, request))
            # Not in the reader itself: one cancelled before its first step would never say so.
            reader.add_done_callback(lambda _, side=side: self.on_side_end(side))  # type: ignore[misc]
            self._readers[side] = reader

    async def next_batch(self) -> Batch:
        """Waits until something happened. The batch with the finish is the last."""
        while not self._tokens and self._merge.finish is None:
            self._wake.clear()
            await self._wake.wait()
        tokens, self._tokens = self._tokens, []
        return Batch(tokens, self._merge.finish)

    def satisfied(self, reason: str) -> None:
        """The gateway has all it needs (a stop string): the sides are told to stop and may say their outcome."""
        self._close(Finish(Ending.STOP), reason, cancel=False)

    def cancel(self, reason: str, status: str = "CANCELLED") -> None:
        """Nobody waits any more, or waiting is over: both sides end now. No-op after the end."""
        self._close(Finish(Ending.FAILED, reason, status), reason, cancel=True)

    async def _read(self, side: Side, request: generation_pb2.GenerateRequest) -> None:
        watch = watch_call(side, self.pair, self.number)
        try:
            call = self.links[side].generation.Generate(
                request, timeout=request.timeout_s + CALL_SLACK_S, metadata=watch.metadata()
            )
            async for response in call:
                events = tell(self._merge, side, response)
                watch.heard(response, any(isinstance(event, Deliver) for event in events))
                self._happened(events)
            self._happened(self._merge.broke(side, "", "its stream ended without an outcome"))
        except grpc.aio.AioRpcError as error:
            watch.failed(error.code().name)
            self._broke(side, error.code().name, error.details() or "no details", refused_for_draining(error))
        except asyncio.CancelledError:
            if not cancelled_by_us():
                self._broke(side, "CANCELLED", "the instance cancelled the call")
                return
            # After the finish this is winding up; before it, the whole gateway stops.
            self._happened(self._merge.close(Finish(Ending.FAILED, "the gateway is stopping", "UNAVAILABLE")))
            raise
        except Exception:
            log.exception("%s: reading the %s side failed", self.request_id, side.value)
            self._happened(self._merge.close(Finish(Ending.FAILED, "the gateway failed", "INTERNAL")))
        finally:
            watch.ended()

    def _broke(self, side: Side, status: str, reason: str, draining: bool = False) -> None:
        log.debug("%s: %s call: %s: %s", self.request_id, side.value, status, reason)
        # Also when the request has ended or the side has told its outcome: the instance is broken all the same.
        if status not in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS"):
            self.on_broken(side, status == "UNAVAILABLE")
        self._happened(self._merge.broke(side, status, f"{reason} ({status})", draining))

    def _happened(self, events: list[Event]) -> None:
        if self._merge.handed_over and not self._handed_over:
            self._handed_over = True
            self.on_hand_over(True)
        for event in events:
            if isinstance(event, Deliver):
                self._tokens.extend(event.tokens)
            elif event.ending is Ending.FAILED:
                if event.hand_over:
                    self.on_hand_over(False)
                if event.draining and event.side is not None:
                    self.on_broken(event.side, True)  # it is no use until it says that it serves
                self._wind_up(event.reason, abort=True, cancel=True)
            else:
                self._wind_up("", abort=False, cancel=False)
        if events:
            self._wake.set()

    def _close(self, finish: Finish, reason: str, cancel: bool) -> None:
        if self._merge.close(finish):
            self._wake.set()
            self._wind_up(reason, abort=True, cancel=cancel)

    def _wind_up(self, reason: str, *, abort: bool, cancel: bool) -> None:
        if not self._closing:
            self._closing = True
            self.background.start(self._end_both(reason, abort, cancel))

    async def _end_both(self, reason: str, abort: bool, cancel: bool) -> None:
        """Runs after the finish, while the client already has its answer."""
        try:
            # Side by side, so that a frozen one does not keep the other running.
            await asyncio.gather(*(self._end_side(side, reason, abort, cancel) for side in Side))
        finally:
            for reader in self._readers.values():
                reader.cancel()

    async def _end_side(self, side: Side, reason: str, abort: bool, cancel: bool) -> None:
        reader = self._readers[side]
        if abort:
            await self._abort(side, reason)
        if not cancel:
            _, pending = await asyncio.wait([reader], timeout=self.config.drain_s)
            if pending and not abort:
                await self._abort(side, "the request has ended")
        reader.cancel()

    async def _abort(self, side: Side, reason: str) -> None:
        if self._merge.has_ended(side):
            return
        request = generation_pb2.AbortRequest(request_id=self.request_id, attempt=self.number, reason=reason)
        try:
            await self.links[side].generation.Abort(request, timeout=_ABORT_TIMEOUT_S)
        except asyncio.CancelledError:
            if cancelled_by_us():
                raise
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:  # the second: its channel is closed
            log.debug("%s: abort on %s side: %s", self.request_id, side.value, error)
