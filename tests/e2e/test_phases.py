"""The phases that both sides and the gateway tell add up to the time to first token that a client measures."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.cluster import Cluster
from tests.e2e.ttft_client import TtftClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


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


def check_sum(model: Path | None, requests: int, prompt: int) -> None:
    with Cluster(model=model) as cluster:
        client = TtftClient(cluster.url)
        ask = {"model": cluster.model, "max_tokens": 4, "min_tokens": 4, "temperature": 0}
        client.stream(ask | {"prompt": [7] * prompt})  # the two sides meet
        before = phase_seconds(cluster)
        streamed = [
            client.stream(ask | {"prompt": [(9 * i + j) % 4000 + 5 for j in range(prompt)]}) for i in range(requests)
        ]
        client.close()
        parts = {name: total - before.get(name, 0.0) for name, total in phase_seconds(cluster).items()}
    measured, explained = sum(one.first_token_s for one in streamed), sum(parts.values())
    assert explained == pytest.approx(measured, rel=0.02), (measured, parts)
    # Every part of a disaggregated request is there, on both sides of the wire.
    for part in ("parse", "route", "network", "prefill_queue", "prefill_bootstrap", "prefill_forward", "prefill_reply", "deliver"):  # fmt: skip
        assert parts[part] > 0, parts
    # The response itself says the same, but for its own delivery.
    told = sum(sum(one.parts.values()) for one in streamed)
    assert told == pytest.approx(explained - parts["deliver"], rel=0.001)


def test_phases_of_some_requests_add_up_to_the_measured_ttft(tiny: Path) -> None:
    check_sum(tiny, requests=12, prompt=2000)


@pytest.mark.soak
def test_phases_of_100_requests_add_up_to_the_measured_ttft() -> None:
    check_sum(None, requests=100, prompt=64)
