"""The `Generation` service of an instance: requests in, tokens and one outcome out.

In: gRPC calls. Out: attempts submitted to rank 0, their events streamed back. Invariants: nothing
unchecked reaches rank 0; a call that ends for whatever reason leaves no attempt running; a reader
that does not read is cut off with a reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc

from consensus.entry import Key, TokenOut
from paceline_proto.v1 import generation_pb2, generation_pb2_grpc
from pipeline import outcome as kinds
from pipeline.io.admission import Limits, Refused, spec_of
from pipeline.io.attempts import AlreadyKnown, QueueFull, Stream, TokenRun
from pipeline.io.observers import Observers
from pipeline.io.phase_times import phases
from pipeline.io.supervisor import Supervisor
from pipeline.outcome import Outcome

log = logging.getLogger(__name__)

_WRITE_PATIENCE_S = 30.0  # for one message to enter the connection
_OVERTIME_S = 30.0  # beyond its deadline, for rank 0 to end an attempt
_LONGEST_REASON = 200
DRAINING = "paceline-draining"  # in the trailing metadata of a refusal: nothing failed

_KINDS = {
    kinds.HANDED_OVER: generation_pb2.Outcome.KIND_HANDED_OVER,
    kinds.STOP: generation_pb2.Outcome.KIND_STOP,
    kinds.LENGTH: generation_pb2.Outcome.KIND_LENGTH,
    kinds.ABORT: generation_pb2.Outcome.KIND_ABORT,
    kinds.ERROR: generation_pb2.Outcome.KIND_ERROR,
}


class _SlowReader(Exception):
    """The client does not read what it asked for."""


class GenerationService(generation_pb2_grpc.GenerationServicer):
    def __init__(self, supervisor: Supervisor, max_model_len: int, observers: Observers) -> None:
        self._supervisor, self._observers = supervisor, observers
        self._attempts = supervisor.attempts
        self._max_model_len = max_model_len

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        arrived = time.monotonic_ns() // 1000
        if not self._supervisor.serving:
            mark = ((DRAINING, "1"),) if self._supervisor.sent_away else ()
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._supervisor.not_serving_reason(), mark)
        if request.epoch not in (0, self._supervisor.epoch):
            meant = f"the request is for epoch {request.epoch}, but this is epoch {self._supervisor.epoch}"
            await context.abort(grpc.StatusCode.UNAVAILABLE, meant)
        try:
            spec = spec_of(request, self._limits())
            stream = self._attempts.open(spec.key)
        except Refused as refused:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
        except AlreadyKnown as known:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, str(known))
        except QueueFull as full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(full))
        gone, too_slow = "the client went away", False
        outcome = None
        try:
            if self._attempts.is_open(spec.key):  # not already aborted
                self._supervisor.submit(spec)
            outcome = await self._relay(stream, context, arrived, spec.timeout / 1e6 + _OVERTIME_S)
        except _SlowReader as slow:
            gone, too_slow = str(slow), True
        finally:
            self._attempts.leave(spec.key, gone)
            metadata = context.invocation_metadata() or ()
            outcome = outcome or Outcome(kinds.ABORT, gone)
            self._observers.ended(spec.key.request, spec.key.attempt, metadata, arrived, stream.stages, outcome)
        if too_slow:
            log.warning("%s: %s", spec.key.room, gone)
            await context.abort(grpc.StatusCode.ABORTED, gone)

    async def _relay(self, stream: Stream, context: Any, arrived: int, patience: float) -> Outcome:
        """Streams events up to the outcome. Raises `_SlowReader`."""
        begun = False
        deadline = asyncio.get_running_loop().time() + patience
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    event = await stream.next()
            except TimeoutError:
                event = Outcome(kinds.ERROR, f"rank 0 gave no outcome within {patience:g} s", 0, retryable=True)
            if stream.overflowed:
                raise _SlowReader(f"the reader was more than {stream.buffer} tokens behind and was cut off")
            stages = stream.stages if isinstance(event, Outcome) else () if begun else stream.first_stages
            message = _on_wire(event, phases(arrived, stages, time.monotonic_ns() // 1000))
            begun = True
            try:
                async with asyncio.timeout(_WRITE_PATIENCE_S):
                    await context.write(message)
            except TimeoutError:
                raise _SlowReader(f"the reader took nothing for {_WRITE_PATIENCE_S:g} s and was cut off") from None
            if isinstance(event, Outcome):
                return event

    async def Abort(self, request: generation_pb2.AbortRequest, context: Any) -> generation_pb2.AbortResponse:  # type: ignore[override]
        if len(request.request_id) <= 256:
            reason = request.reason[:_LONGEST_REASON] or "aborted"
            self._attempts.abort(Key(request.request_id, request.attempt), reason)
        return generation_pb2.AbortResponse()

    def _limits(self) -> Limits:
        config = self._supervisor.config
        return Limits(
            role=config.role,
            instance=config.instance,
            vocab_size=self._supervisor.facts.vocab_size,
            max_model_len=self._max_model_len,
            page_size=config.page_size,
            pages=self._supervisor.pages,
            default_timeout_s=config.request_timeout,
        )


def _on_wire(event: TokenRun | Outcome, took: list[generation_pb2.Phase]) -> generation_pb2.GenerateResponse:
    if isinstance(event, TokenRun):
        tokens = [_token(token) for token in event.tokens]
        chunk = generation_pb2.TokenChunk(position=event.position, tokens=tokens, phases=took)
        return generation_pb2.GenerateResponse(tokens=chunk)
    return generation_pb2.GenerateResponse(
        outcome=generation_pb2.Outcome(
            kind=_KINDS.get(event.kind, generation_pb2.Outcome.KIND_ERROR),
            reason=event.reason,
            output_tokens=event.output_tokens,
            retryable=event.retryable,
            hand_over=event.hand_over,
            draining=event.draining,
            phases=took,
        )
    )


def _token(token: TokenOut) -> generation_pb2.Token:
    top = [generation_pb2.TopLogprob(id=other, logprob=logprob) for other, logprob in token.top]
    return generation_pb2.Token(id=token.token, logprob=token.logprob, top=top)
