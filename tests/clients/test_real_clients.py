"""Six clients of other people, run by the commands of docs/clients.md against a real cluster.

For each: it exits with 0, its own report knows no failed request and the token counts that were asked for,
and the gateway has seen only requests that ended as they should. Afterwards the cluster is as after its start.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.smollm2 import ensure_default_model
from tests.clients.installed import COMMANDS, command_of, installed
from tests.e2e.cluster import Cluster

COMMAND_S = 600
pytestmark = [pytest.mark.clients, pytest.mark.soak, pytest.mark.timeout(2400)]

# Mooncake's format: the prompts longer than 512 tokens share their first block.
TRACE: list[dict[str, Any]] = [
    {
        "timestamp": 300 * i,
        "input_length": 100 + 90 * i,
        "output_length": 8 + 2 * (i % 4),
        "hash_ids": [*([0] * ((100 + 90 * i) // 512)), 10 + i],
    }
    for i in range(8)
]


class Client:
    """Runs clients' documented commands in a folder of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def run(self, name: str) -> None:
        """It must exit with 0."""
        environment = {
            **{key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "PATH": f"{installed(name) / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
            "URL": self.cluster.url,
            "NAME": self.cluster.model,
            "MODEL": str(ensure_default_model()),
            "PACELINE": str(COMMANDS.parents[1]),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command_of(name)],
            check=False, capture_output=True, text=True, timeout=COMMAND_S, cwd=self.folder, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, f"{name} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"

    def report(self, name: str) -> Any:
        (path,) = self.folder.rglob(name)
        return json.loads(path.read_text())

    def requests(self) -> Counter[tuple[str, str]]:
        """How many requests the gateway has seen, by endpoint and outcome."""
        with urllib.request.urlopen(self.cluster.url + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found: Counter[tuple[str, str]] = Counter()
        for line in lines:
            if line.startswith("paceline_gateway_requests_total{"):
                _, endpoint, _, outcome, count = line.split('"')
                found[endpoint, outcome] = int(float(count.removeprefix("} ")))
        return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster(model=ensure_default_model()) as running:
        yield running
        running.assert_baseline()


@pytest.fixture
def client(cluster: Cluster, tmp_path: Path) -> Iterator[Client]:
    running = Client(cluster, tmp_path)
    before = running.requests()
    yield running
    seen = running.requests() - before
    assert seen, "no request reached the gateway"
    assert {outcome for _, outcome in seen} <= {"stop", "length"}, seen


def test_openai(client: Client) -> None:
    client.run("openai")
    told = client.report("openai.json")
    assert told["usage"] == [24, 16] and told["logprobs"] == [12, 12]
    assert len(set(told["choices"])) == 2
    assert "Paris" in told["texts"][0] and "4" in told["texts"][1]
    assert told["models"] == [client.cluster.model]


def test_litellm(client: Client) -> None:
    client.run("litellm")
    told = client.report("litellm.json")
    assert told["streamed"] == [16] * 8 and told["reasons"] == ["length"] * 8
    assert len(told["whole"]) == 2 and "4" in told["whole"][0]


def test_aiperf_replays_a_mooncake_trace(client: Client) -> None:
    (client.folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    client.run("aiperf")
    told = client.report("profile_export_aiperf.json")
    assert (told["error_summary"], told["was_cancelled"], told["request_error_rate"]["avg"]) == ([], False, 0)
    assert told["request_count"]["avg"] == len(TRACE)
    assert told["total_usage_completion_tokens"]["avg"] == sum(row["output_length"] for row in TRACE)
    assert told["total_usage_prompt_tokens"]["avg"] >= sum(row["input_length"] for row in TRACE)
    scraped = client.report("server_metrics_export.json")
    assert scraped["summary"]["endpoints_successful"] == [client.cluster.url + "/metrics"]
    assert any(name.startswith("paceline_gateway_") for name in scraped["metrics"])


def test_guidellm(client: Client) -> None:
    client.run("guidellm")
    (benchmark,) = client.report("guidellm.json")["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 20, "errored": 0, "incomplete": 0, "total": 20}
    output = benchmark["metrics"]["output_token_count"]["successful"]
    assert (output["min"], output["max"]) == (16, 16)


def test_evalscope_perf(client: Client) -> None:
    lines = [f"Tell me a story about the number {i}." for i in range(16)]
    (client.folder / "prompts.txt").write_text("\n".join(lines) + "\n")
    client.run("evalscope")
    told = client.report("benchmark_summary.json")
    assert (told["Success Requests"], told["Failed Requests"], told["Avg Output Tokens"]) == (16, 0, 16.0)
    assert told["Avg Input Tokens"] > 16


def test_sglangs_serving_benchmark(client: Client) -> None:
    client.run("sglang")
    lines = (client.folder / "sglang.jsonl").read_text().splitlines()
    for line, backend in zip(lines, ("sglang-oai-chat", "sglang-oai"), strict=True):
        told = json.loads(line)
        assert (told["backend"], told["completed"], told["total_output_tokens"]) == (backend, 16, 16 * 16)
