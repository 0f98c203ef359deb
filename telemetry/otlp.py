"""Spans for an OpenTelemetry collector, over OTLP/gRPC.

In: spans as in `telemetry.spans`. Out: batches that a thread of the SDK sends. Invariants: nothing waits for the
collector; at most 2048 ended spans wait for it, more are dropped; whether a trace is recorded is the caller's
decision where it made one (`traceparent`'s sampled flag), else yes.

The SDK comes with the extra `otel` and is imported only if a collector was named.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from telemetry.spans import SILENT, TRACEPARENT, TRACESTATE, Attributes, Kind, Span, Tracer, passed_on

_CLOSE_S = 2.0
_QUEUED = 2048


class NoSdk(ValueError):
    """A collector was named, but the packages that talk to it are not installed."""


def make_tracer(collector: str, service: str, instance: str) -> Tracer:
    """For `host:port` of an OTLP/gRPC collector, or none: "". Raises `NoSdk`."""
    return OtlpTracer(collector, service, instance) if collector else SILENT


class OtlpTracer:
    def __init__(self, collector: str, service: str, instance: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise NoSdk(
                f"--otlp {collector} needs OpenTelemetry: install paceline with its extra otel ({error})"
            ) from error
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        exporter = OTLPSpanExporter(endpoint=f"http://{collector}", insecure=True, timeout=5)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_QUEUED, schedule_delay_millis=1000)
        )
        self._tracer = self._provider.get_tracer("paceline")
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace

    def begin(
        self,
        name: str,
        carrier: Mapping[str, str],
        at: int,
        kind: Kind = "server",
        attributes: Attributes | None = None,
    ) -> Span:
        # The two clocks of this host are compared anew for every request: the wall clock may be set.
        offset = time.time_ns() - time.monotonic_ns()
        return self.start(name, self._propagator.extract(passed_on(carrier)), at, kind, attributes, offset)

    def close(self) -> None:
        # The SDK would wait half a minute for a collector that does not answer.
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)

    def start(
        self, name: str, context: Any, at: int, kind: Kind, attributes: Attributes | None, offset: int
    ) -> OtlpSpan:
        """`offset`: wall clock minus monotonic clock, in ns."""
        kinds = self._trace.SpanKind
        chosen = {"server": kinds.SERVER, "client": kinds.CLIENT, "internal": kinds.INTERNAL}[kind]
        span = self._tracer.start_span(
            name, context=context, kind=chosen, attributes=dict(attributes or {}), start_time=at * 1000 + offset
        )
        return OtlpSpan(self, span, offset)

    def context_of(self, span: Any) -> Any:
        return self._trace.set_span_in_context(span)

    def headers_of(self, span: Any) -> dict[str, str]:
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self.context_of(span))
        return {name: headers[name] for name in (TRACEPARENT, TRACESTATE) if name in headers}

    def error(self, reason: str) -> Any:
        return self._trace.Status(self._trace.StatusCode.ERROR, reason[:500])


class OtlpSpan:
    def __init__(self, tracer: OtlpTracer, span: Any, offset: int) -> None:
        self._tracer, self._span, self._offset = tracer, span, offset

    def begin(self, name: str, at: int, kind: Kind = "internal", attributes: Attributes | None = None) -> Span:
        return self._tracer.start(name, self._tracer.context_of(self._span), at, kind, attributes, self._offset)

    def add(self, name: str, begin: int, end: int) -> None:
        self.begin(name, begin).end(end)

    def describe(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def failed(self, reason: str) -> None:
        self._span.set_status(self._tracer.error(reason))

    def end(self, at: int) -> None:
        if self._span.is_recording():
            self._span.end(end_time=at * 1000 + self._offset)

    def headers(self) -> dict[str, str]:
        return self._tracer.headers_of(self._span)
