"""What Prometheus may know of the gateway.

In: observations. Out: the text of /metrics. All names begin with `paceline_gateway_`. Each
`Metrics` has a registry of its own, so that several gateways can live in one process.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.instances import Fleet

_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_PHASE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_E2E = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = "paceline_gateway_{}".format
        self.requests = Counter(
            name("requests"), "Generation requests by endpoint and outcome", ["endpoint", "outcome"], registry=registry
        )
        self.refused = Counter(
            name("refused"),
            "Requests and connections turned away before they counted, by why",
            ["why"],
            registry=registry,
        )
        self.in_flight = Gauge(
            name("requests_in_flight"), "Generations running now; each choice of a request is one", registry=registry
        )
        self.first_token = Histogram(
            name("time_to_first_token_seconds"), "Arrival to first token", buckets=_TTFT, registry=registry
        )
        self.inter_token = Histogram(
            name("inter_token_seconds"), "Between consecutive tokens of a request", buckets=_ITL, registry=registry
        )
        self._phases = Histogram(
            name("phase_seconds"),
            "Parts of the time to first token, one after the other, up to the first write to the client",
            ["phase"],
            buckets=_PHASE,
            registry=registry,
        )
        self._attempt_phases = Histogram(
            name("attempt_phase_seconds"),
            "Phases of whole attempts, as the instances tell with their outcome",
            ["side", "phase"],
            buckets=_PHASE,
            registry=registry,
        )
        self.duration = Histogram(name("request_seconds"), "Arrival to the end", buckets=_E2E, registry=registry)
        self.attempts = Counter(name("attempts"), "Attempts started on a pair of instances", registry=registry)
        self._resumes = Counter(
            name("resumes"),
            "Attempts that went on after one that failed, by what failed",
            ["reason"],
            registry=registry,
        )
        self._resumed = Counter(name("resumed_requests"), "Requests resumed at least once", registry=registry)
        self.given_up = Counter(
            name("resumes_given_up"),
            "Requests that could not be resumed, by what failed",
            ["reason"],
            registry=registry,
        )
        self.turned_away = Counter(
            name("requests_too_late"), "Requests turned away: no first token in their time", registry=registry
        )
        self.prompt_tokens = Counter(name("prompt_tokens"), "Prompt tokens accepted", registry=registry)
        self.output_tokens = Counter(name("output_tokens"), "Output tokens merged", registry=registry)
        self.request_prompt_tokens = Histogram(
            name("request_prompt_tokens"), "Prompt tokens per request", buckets=_TOKENS, registry=registry
        )
        self.request_output_tokens = Histogram(
            name("request_output_tokens"), "Output tokens per request", buckets=_TOKENS, registry=registry
        )
        self._instances = Gauge(name("serving_instances"), "Instances that take requests", ["role"], registry=registry)

    def tokens_arrived(self, count: int, seconds: float, first: bool) -> None:
        """`count` tokens came together, `seconds` after the ones before (or after the request)."""
        self.output_tokens.inc(count)
        if first:
            self.first_token.observe(seconds)
            count, seconds = count - 1, 0.0
        for _ in range(count):
            self.inter_token.observe(seconds / count)

    def first_token_phases(self, parts: Iterable[tuple[str, float]]) -> None:
        for name, seconds in parts:
            self._phases.labels(name).observe(seconds)

    def attempt_phases(self, side: str, parts: Iterable[tuple[str, float]]) -> None:
        for name, seconds in parts:
            self._attempt_phases.labels(side, name).observe(seconds)

    def resumed(self, reason: str, first: bool) -> None:
        """A request goes on after a failure; `first`: after its first one."""
        self._resumes.labels(reason).inc()
        if first:
            self._resumed.inc()

    def render(self, fleet: Fleet) -> bytes:
        self._instances.labels("prefill").set(len(fleet.prefills))
        self._instances.labels("decode").set(len(fleet.decodes))
        return generate_latest(self.registry)
