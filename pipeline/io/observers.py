"""Whom a daemon tells what its attempts did: Prometheus always, a collector of traces where one was named.

In: the stages of attempts as they end. Out: calls to what exists. Neither holds up or fails an attempt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.io.attempt_metrics import AttemptMetrics
from pipeline.io.phase_times import intervals
from pipeline.outcome import ERROR, Outcome
from pipeline.phases import Stages
from telemetry.spans import Attributes, Tracer

# (name, value) of a call; values of binary headers are bytes and no concern of ours.
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Observers:
    role: str
    metrics: AttemptMetrics
    tracer: Tracer

    def ended(
        self, request_id: str, attempt: int, metadata: Metadata, arrived: int, stages: Stages, outcome: Outcome
    ) -> None:
        """`metadata`: of the call, for its trace; `arrived`: in µs of the monotonic clock."""
        now = time.monotonic_ns() // 1000
        parts = list(intervals(arrived, stages, now))
        self.metrics.ended(outcome, parts)
        carrier = {name: value for name, value in metadata if isinstance(value, str)}
        attributes: Attributes = {"request.id": request_id, "request.attempt": attempt, "outcome": outcome.kind}
        span = self.tracer.begin(f"{self.role} Generate", carrier, arrived, "server", attributes)
        if outcome.kind == ERROR:
            span.failed(outcome.reason)
        for phase, begin, end in parts:
            span.add(f"{self.role} {phase}", begin, end)
        span.end(now)
