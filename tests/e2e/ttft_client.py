"""A streaming client that measures its own time to first token, and compares it with what the system tells of it.

One kept connection, and nothing between the client and its socket.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Streamed:
    first_token_s: float  # from the first byte sent to the first event's arrival
    parts: dict[str, float]  # seconds, as the response's Server-Timing says; without the delivery


class TtftClient:
    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._connection.connect()

    def stream(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Streamed:
        data = json.dumps(body | {"stream": True, "return_token_ids": True}).encode()
        began = time.monotonic()
        self._connection.request(
            "POST", "/v1/completions", data, {"Content-Type": "application/json", **(headers or {})}
        )
        response = self._connection.getresponse()
        line = response.readline()
        took = time.monotonic() - began
        assert response.status == 200 and line.startswith(b"data: {"), (response.status, line)
        assert response.read().endswith(b"data: [DONE]\n\n")
        return Streamed(took, parse_server_timing(response.headers["Server-Timing"]))

    def close(self) -> None:
        self._connection.close()


def parse_server_timing(header: str) -> dict[str, float]:
    parts: dict[str, float] = {}
    for part in header.split(", "):
        name, _, milliseconds = part.partition(";dur=")
        parts[name] = parts.get(name, 0.0) + float(milliseconds) / 1000
    return parts


def check_phases(cluster: Cluster, requests: int, prompt: int) -> None:
    """Sums over all requests: what the gateway's metrics explain is what the client measured, within 2 %."""
    client = TtftClient(cluster.url)
    ask = {"model": cluster.model, "max_tokens": 4, "min_tokens": 4, "temperature": 0}
    client.stream(ask | {"prompt": [7] * prompt})  # the two sides meet
    before = phase_seconds(cluster)
    prompts = [[(9 * i + j) % 4000 + 5 for j in range(prompt)] for i in range(requests)]
    streamed = [client.stream(ask | {"prompt": ids}) for ids in prompts]
    client.close()
    parts = {name: total - before.get(name, 0.0) for name, total in phase_seconds(cluster).items()}
    measured, explained = sum(one.first_token_s for one in streamed), sum(parts.values())
    print(f"measured {measured:.4f} s, explained {explained:.4f} s ({explained / measured:.2%}): {parts}")
    assert explained == pytest.approx(measured, rel=0.02), (measured, parts)
    # Every part of a disaggregated request is there, on both sides of the wire.
    wanted = "parse route network prefill_queue prefill_bootstrap prefill_forward prefill_reply deliver".split()
    assert all(parts[part] > 0 for part in wanted), parts
    # The response itself says the same, but for its own delivery.
    told = sum(sum(one.parts.values()) for one in streamed)
    assert told == pytest.approx(explained - parts["deliver"], rel=0.001)


def phase_seconds(cluster: Cluster) -> dict[str, float]:
    """Sum of each part over all requests so far, from the gateway's metrics."""
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        sample.labels["phase"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "paceline_gateway_phase_seconds_sum"
    }
