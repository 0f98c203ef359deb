"""Where time goes: differences of what a server observed."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from bench.breakdown import differences, read_metrics
from bench.gateway_throughput import FIRST_STREAM, added_gaps
from bench.records import Record


def test_histograms_are_told_by_what_was_observed_in_between() -> None:
    registry = CollectorRegistry()
    phase = Histogram("phase_seconds", "x", ["phase"], registry=registry)
    idle = Histogram("idle_seconds", "x", registry=registry)
    phase.labels("queue").observe(100.0)
    idle.observe(5.0)

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(generate_latest(registry))

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        before = read_metrics(url)
        for seconds in (1.0, 3.0):
            phase.labels("queue").observe(seconds)
        phase.labels("prefill").observe(0.5)
        found = differences(before, read_metrics(url + "/v1"))
    finally:
        server.shutdown()
        server.server_close()
    assert [(seen.labels, seen.count, seen.mean) for seen in found] == [
        ('{"phase": "prefill"}', 1, 0.5), ('{"phase": "queue"}', 2, 2.0)
    ]  # fmt: skip
    assert {seen.name for seen in found} == {"phase_seconds"}


def test_a_server_without_metrics_has_no_phases(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_metrics("http://127.0.0.1:1") == {}
    assert "no figures from the server's /metrics" in capsys.readouterr().err


def test_the_added_gap_is_what_was_read_less_what_was_told() -> None:
    """Tokens told at 1, 2, 3 are read at 1.1, 2.1 and, the last two together with a fourth, at 3.6."""
    record = Record(
        index=0, scheduled=0, sent=0, ended=4, chunks=((0.5, 1), (1.1, 1), (2.1, 1), (3.6, 2)), asked_tokens=5
    )
    assert added_gaps([record], {FIRST_STREAM: [1.0, 2.0, 3.0, 3.5]}) == pytest.approx([0, 500, -500])
