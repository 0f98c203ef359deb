"""A collector of traces for tests: a real OTLP/gRPC server that keeps what it is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Collected:
    service: str
    instance: str
    name: str
    kind: int  # 1 internal, 2 server, 3 client
    trace: str
    span: str
    parent: str
    begin_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, str]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    address: str = ""
    spans: list[Collected] = field(default_factory=list)

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(_collected(about, span))
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, wanted: Callable[[list[Collected]], bool]) -> list[Collected]:
        """All spans so far, as soon as they are what is wanted."""
        deadline = time.monotonic() + DEADLINE_S
        while not wanted(self.spans):
            assert time.monotonic() < deadline, [(span.service, span.name) for span in self.spans]
            time.sleep(0.05)
        return list(self.spans)


def _collected(about: dict[str, str], span: Any) -> Collected:
    return Collected(
        about["service.name"], about["service.instance.id"], span.name, span.kind, span.trace_id.hex(),
        span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano,
        span.status.code == 2, {pair.key: pair.value.string_value for pair in span.attributes},
    )  # fmt: skip


@contextmanager
def collecting() -> Iterator[Collector]:
    server = grpc.server(ThreadPoolExecutor(4))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
