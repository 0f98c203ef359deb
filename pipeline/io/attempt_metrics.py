"""What a daemon counts itself as attempts end; the rest of an instance's metrics is read from its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from pipeline.outcome import Outcome

# Seconds; most phases of an unloaded instance are below a millisecond, a queue may be minutes.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class AttemptMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._attempts = Counter(
            "paceline_instance_attempts", "Attempts that ended here, by outcome", ["outcome"], registry=registry
        )
        self._phases = Histogram(
            "paceline_instance_phase_seconds", "Time an attempt was in a phase", ["phase"], buckets=BUCKETS,
            registry=registry,
        )  # fmt: skip

    def ended(self, outcome: Outcome, parts: Sequence[tuple[str, int, int]]) -> None:
        """`parts`: phase, begin, end in µs."""
        self._attempts.labels(outcome.kind).inc()
        for phase, begin, end in parts:
            self._phases.labels(phase).observe((end - begin) / 1e6)
