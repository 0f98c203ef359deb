"""What a request costs on the wire: its KV, once, and nothing for the empty part of its last page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LAYERS, BYTES_PER_TOKEN = 8, 2 * 2 * 16 * 4  # of a layer: K and V, 2 heads of 16, float32


@pytest.mark.parametrize("backend", ["mooncake", "nixl", "stream"])
def test_bytes_on_the_wire_are_the_prompts_kv(tiny: Path, backend: str) -> None:
    with Cluster("--transfer-backend", backend, "--chunk-size", "64", model=tiny, prefill_pp=3) as cluster:
        cluster.generate([7], 2)
        for length in (1, 15, 16, 17, 100, 1000):
            before = cluster.counter("prefill", "kv_bytes_sent")
            cluster.generate(list(range(5, 5 + length)), 2)
            sent = cluster.counter("prefill", "kv_bytes_sent") - before
            assert sent == pytest.approx(length * LAYERS * BYTES_PER_TOKEN, rel=0.01), length
