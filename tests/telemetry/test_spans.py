"""Spans reach a real OTLP receiver as they were told; without one nothing is imported and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from telemetry.otlp import make_tracer
from telemetry.spans import SILENT, passed_on
from tests.telemetry.collector import collecting

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = PARENT[:-1] + "0"


def now_us() -> int:
    return time.monotonic_ns() // 1000


def test_a_trace_goes_through_two_processes_with_the_times_it_was_told() -> None:
    with collecting() as collector:
        front = make_tracer(collector.address, "front", "f0")
        back = make_tracer(collector.address, "back", "b0")
        at = now_us() - 5_000_000
        wall = time.time_ns() - 5_000_000_000
        root = front.begin("POST", {"traceparent": PARENT}, at)
        call = root.begin("call", at + 1000, "client", {"attempt": 0})
        served = back.begin("serve", call.headers(), at + 2000)
        served.add("forward", at + 3000, at + 4000)
        served.failed("no luck")
        for span, end in ((served, 5000), (call, 6000), (root, 7000)):
            span.end(at + end)
            span.end(at + 10 * end)  # once is enough
        front.close()
        back.close()
        spans = {span.name: span for span in collector.wait(lambda spans: len(spans) == 4)}
    assert {span.trace for span in spans.values()} == {PARENT[3:35]}
    assert spans["POST"].parent == PARENT[36:52]
    assert spans["call"].parent == spans["POST"].span
    assert spans["serve"].parent == spans["call"].span
    assert spans["forward"].parent == spans["serve"].span
    assert [spans[name].kind for name in ("POST", "call", "serve", "forward")] == [2, 3, 2, 1]
    assert [spans[name].service for name in ("POST", "call", "serve")] == ["front", "front", "back"]
    assert spans["serve"].failed and not spans["call"].failed
    assert spans["forward"].end_ns - spans["forward"].begin_ns == pytest.approx(1_000_000, abs=100_000)
    assert spans["POST"].begin_ns == pytest.approx(wall, abs=500_000_000)


def test_a_client_that_wants_no_trace_gets_none_and_another_process_hears_so() -> None:
    with collecting() as collector:
        tracer = make_tracer(collector.address, "front", "f0")
        unwanted = tracer.begin("POST", {"traceparent": UNSAMPLED}, now_us())
        assert unwanted.headers()["traceparent"].endswith("-00")
        unwanted.end(now_us())
        tracer.begin("wanted", {}, now_us()).end(now_us())
        tracer.close()
        assert [span.name for span in collector.wait(lambda spans: len(spans) > 0)] == ["wanted"]


def test_what_nobody_collects_passes_on_what_came() -> None:
    span = SILENT.begin("POST", {"traceparent": PARENT, "tracestate": "a=b", "cookie": "x"}, 0)
    assert span.begin("call", 0, "client").headers() == {"traceparent": PARENT, "tracestate": "a=b"}
    span.add("x", 0, 1)
    span.end(1)


@pytest.mark.parametrize("parent", ["", "00-1-2-3", PARENT.upper(), PARENT + "\r\nx: y", "x" * 100_000])
def test_what_is_no_trace_context_goes_nowhere(parent: str) -> None:
    assert passed_on({"traceparent": parent, "tracestate": "a=b"}) == {}


def test_a_tracestate_that_is_too_long_is_left_out() -> None:
    assert passed_on({"traceparent": PARENT, "tracestate": "a" * 513}) == {"traceparent": PARENT}


def test_without_a_collector_the_sdk_is_not_imported() -> None:
    code = "import sys, gateway.app; from telemetry.otlp import make_tracer; make_tracer('', 'a', 'b'); print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
