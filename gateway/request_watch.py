"""Follows one request for metrics and traces, beside the code that serves it.

In: what handlers and calls tell it as they go. Out: the phases of the time to the first token as histogram and
header, and a span per phase and call. A request's watch is in a context variable, which the tasks that the request
starts inherit; where there is none (a test of a part), nothing is watched.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from gateway.instances import Pair, Side
from gateway.metrics import Metrics
from gateway.phases import OWN, Breakdown, believed
from paceline_proto.v1 import generation_pb2
from telemetry.spans import Attributes, Span, Tracer

_current: ContextVar[RequestWatch | None] = ContextVar("request watch", default=None)


@dataclass(slots=True)
class RequestWatch:
    metrics: Metrics
    span: Span
    breakdown: Breakdown
    outcome: str = "failed"

    def parsed(self) -> None:
        self.breakdown.parsed(time.monotonic())

    def delivered(self) -> None:
        """Called after every write to the client; the first after a token counts."""
        self.breakdown.delivered(time.monotonic())

    def ended(self) -> None:
        breakdown = self.breakdown
        if breakdown.told:
            self.metrics.first_token_phases(breakdown.parts)
        at = breakdown.arrived
        for name, seconds in breakdown.parts:
            if name in OWN:
                self.span.add(name, _us(at), _us(at + seconds))
            at += seconds
        self.span.describe({"outcome": self.outcome})
        if self.outcome in ("failed", "timeout"):
            self.span.failed(self.outcome)
        self.span.end(_us(time.monotonic()))


@contextmanager
def watched(
    metrics: Metrics, tracer: Tracer, name: str, headers: Mapping[str, str], arrived: float
) -> Iterator[RequestWatch]:
    """`headers`: the client's; its trace goes on."""
    carrier = {key.lower(): value for key, value in headers.items()}
    watch = RequestWatch(metrics, tracer.begin(name, carrier, _us(arrived)), Breakdown(arrived))
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)
        watch.ended()


@dataclass(slots=True)
class CallWatch:
    """One call to one side of a pair."""

    side: Side
    _watch: RequestWatch | None
    _span: Span | None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """By which the instance continues the trace."""
        return tuple(self._span.headers().items()) if self._span is not None else ()

    def heard(self, response: generation_pb2.GenerateResponse, delivered: bool) -> None:
        """`delivered`: the client gets a token for it."""
        if self._watch is None:
            return
        if response.HasField("outcome"):
            self._watch.metrics.attempt_phases(self.side.value, _phases(response.outcome.phases))
        elif delivered:
            self._watch.breakdown.heard(self.side, _phases(response.tokens.phases), time.monotonic())

    def failed(self, reason: str) -> None:
        if self._span is not None:
            self._span.failed(reason)

    def ended(self) -> None:
        if self._span is not None:
            self._span.end(_us(time.monotonic()))


def watch_call(side: Side, pair: Pair, attempt: int) -> CallWatch:
    """To be made in the task that makes the call, just before it."""
    watch = _current.get()
    if watch is None:
        return CallWatch(side, None, None)
    now = time.monotonic()
    watch.breakdown.called(attempt, now)
    attributes: Attributes = {"attempt": attempt, "instance.id": pair.of(side).instance_id}
    return CallWatch(side, watch, watch.span.begin(f"{side.value} call", _us(now), "client", attributes))


def _phases(told: Iterable[generation_pb2.Phase]) -> list[tuple[str, float]]:
    return believed((phase.name, phase.seconds) for phase in told)


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
