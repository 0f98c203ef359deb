"""One real cluster, looked at in every way an operator can: metrics, traces, timeline, top."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.cluster import Cluster
from tests.e2e.ttft_client import TtftClient, check_phases
from tests.paceline.chrome_trace import check_trace
from tests.telemetry.collector import Collected, Collector, collecting

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
CHUNK, PROMPT, TOKENS = 64, 300, 8


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(tiny: Path, collector: Collector) -> Iterator[Cluster]:
    with Cluster("--chunk-size", str(CHUNK), "--otlp", collector.address, model=tiny) as cluster:
        yield cluster


def run(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "paceline.cli", *arguments, "--run-dir", cluster.folder.name]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=env).stdout


def metrics(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def metrics_of(cluster: Cluster, role: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return metrics(next(part["metrics"] for part in cluster.record["parts"] if part["role"] == role))


def test_instances_tell_prometheus_what_they_did(cluster: Cluster) -> None:
    cluster.generate(list(range(5, 5 + PROMPT)), TOKENS)
    cluster.assert_baseline()
    prefill, decode = metrics_of(cluster, "prefill"), metrics_of(cluster, "decode")
    for rank in ("0", "1"):
        at = (("rank", rank),)
        assert prefill["paceline_rank_up", at] == decode["paceline_rank_up", at] == 1
        assert prefill["paceline_rank_prompt_tokens_total", at] == PROMPT
        assert prefill["paceline_rank_ticks_total", at] == -(-PROMPT // CHUNK)
        # The first token is prefill's own.
        assert (
            decode["paceline_rank_generation_tokens_total", at] == TOKENS - 1 == decode["paceline_rank_ticks_total", at]
        )
        assert (
            prefill["paceline_rank_ballots_opened_total", at] == prefill["paceline_rank_ballots_decided_total", at] > 0
        )
        assert prefill["paceline_rank_kv_transfers_done_total", at] == 1
        assert prefill["paceline_rank_kv_transfer_seconds_total", at] > 0
        assert prefill["paceline_rank_kv_sent_bytes_total", at] > 0
        for told in (prefill, decode):
            compute, flight = (
                told["paceline_rank_compute_seconds_total", at],
                told["paceline_rank_in_flight_seconds_total", at],
            )
            assert 0 < compute <= flight
            assert told["paceline_rank_bubble_seconds_total", at] == pytest.approx(flight - compute, abs=1e-5)
            pages = {dict(labels)["state"]: value for (name, labels), value in told.items()
                     if name == "paceline_rank_kv_pages" and ("rank", rank) in labels}  # fmt: skip
            assert pages["free"] == sum(pages.values()) > 0
    assert prefill["paceline_instance_attempts_total", (("outcome", "handed_over"),)] == 1
    assert decode["paceline_instance_attempts_total", (("outcome", "length"),)] == 1
    for phase in ("queue", "bootstrap", "forward", "hand_over", "reply"):
        assert prefill["paceline_instance_phase_seconds_count", (("phase", phase),)] == 1, phase
    for phase in ("queue", "handshake", "transfer", "forward", "generate", "reply"):
        assert decode["paceline_instance_phase_seconds_count", (("phase", phase),)] == 1, phase
    assert prefill["paceline_instance_divergences_total", ()] == prefill["paceline_instance_restarts_total", ()] == 0


def test_a_trace_goes_from_the_client_through_both_sides(cluster: Cluster, collector: Collector) -> None:
    trace, parent = os.urandom(16).hex(), os.urandom(8).hex()
    client = TtftClient(cluster.url)
    ask = {"model": cluster.model, "prompt": list(range(9, 109)), "max_tokens": 6, "min_tokens": 6, "temperature": 0}
    client.stream(ask, {"traceparent": f"00-{trace}-{parent}-01"})
    client.close()

    def ours(spans: list[Collected]) -> dict[str, Collected]:
        return {span.name: span for span in spans if span.trace == trace}

    wanted = {"POST /v1/completions", "parse", "route", "deliver", "prefill call", "decode call"}
    wanted |= {"prefill Generate", "prefill queue", "prefill bootstrap", "prefill forward", "prefill reply"}
    wanted |= {"decode Generate", "decode handshake", "decode transfer", "decode forward", "decode generate"}
    spans = ours(collector.wait(lambda spans: wanted <= ours(spans).keys()))
    front = spans["POST /v1/completions"]
    assert front.parent == parent and front.service == "paceline-gateway"
    for side in ("prefill", "decode"):
        call, served = spans[f"{side} call"], spans[f"{side} Generate"]
        assert call.parent == front.span and served.parent == call.span
        assert (served.service, served.instance) == (f"paceline-{side}", f"{side}-0")
        assert call.attributes["instance.id"] == f"{side}-0"
        phases = sorted((span for span in spans.values() if span.parent == served.span), key=lambda span: span.begin_ns)
        assert {span.service for span in phases} == {served.service}
        # One after the other, from the call's arrival to its end.
        assert phases[0].begin_ns == served.begin_ns and phases[-1].end_ns == served.end_ns
        assert all(one.end_ns == two.begin_ns for one, two in pairwise(phases))
        assert call.begin_ns <= served.begin_ns
    assert not any(span.failed for span in spans.values())


def test_the_timeline_shows_what_two_ranks_did(cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.counter("prefill", "ticks") // 2  # it is the sum of both ranks
    cluster.generate([(7 * i) % 4000 + 5 for i in range(PROMPT)], TOKENS)
    cluster.assert_baseline()
    out = tmp_path / "trace.json"
    summary = run(cluster, "timeline", "--out", str(out), "--summary")
    made: dict[str, Any] = json.loads(out.read_text())
    check_trace(made)
    names = {event["pid"]: event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"}
    assert sorted(names.values()) == ["decode-0 rank 0", "decode-0 rank 1", "prefill-0 rank 0", "prefill-0 rank 1"]
    ticks: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in made["traceEvents"]:
        if event["ph"] == "X" and event["name"].startswith("tick "):
            ticks[names[event["pid"]]].append(event)
    chunks = [
        [event["args"] for event in ticks[f"prefill-0 rank {rank}"] if event["args"]["tick"] > before]
        for rank in (0, 1)
    ]
    wanted = [(before + 1 + i, CHUNK * i, min(CHUNK, PROMPT - CHUNK * i)) for i in range(-(-PROMPT // CHUNK))]
    for rank in (0, 1):  # the chunks, in order, on each rank
        assert [(a["tick"], a["start"], a["tokens"]) for a in chunks[rank]] == wanted
    for role in ("prefill", "decode"):  # each tick on rank 1 after it was over on rank 0
        first, second = ticks[f"{role}-0 rank 0"], ticks[f"{role}-0 rank 1"]
        assert [event["args"]["tick"] for event in first] == [event["args"]["tick"] for event in second]
        assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in zip(first, second, strict=True))
    handed = Counter(
        names[event["pid"]] for event in made["traceEvents"] if event["ph"] == "b" and event["args"]["good"]
    )
    assert set(handed) == set(names.values()), "each rank pushed or awaited KV"
    for line in summary.splitlines()[1:]:
        fraction = float(re.findall(r"([\d.]+)%", line)[0])
        assert 0 < fraction < 100, line
    assert summary.count("prefill-0") == summary.count("decode-0") == 2
    assert not [event for event in json.loads(_recent(cluster, tmp_path))["traceEvents"] if event["ph"] == "X"]


def _recent(cluster: Cluster, tmp_path: Path) -> str:
    run(cluster, "timeline", "--out", str(tmp_path / "recent.json"), "--seconds", "0.001")
    return (tmp_path / "recent.json").read_text()


def test_the_profile_of_a_load_agrees_with_the_counters(cluster: Cluster, tmp_path: Path) -> None:
    names = ("ticks", "compute_us", "in_flight_us")
    before = {(role, name): cluster.counter(role, name) for role in ("prefill", "decode") for name in names}
    told = tmp_path / "profile.json"
    run(cluster, *"bench profile --concurrency 2 --requests 4 --warmup 0 --input 150 --output 6 --json".split(),
        str(told), "--url", cluster.url)  # fmt: skip
    cluster.assert_baseline()
    made = json.loads(told.read_text())
    for role in ("prefill", "decode"):
        ranks = [rank for rank in made["ranks"] if rank["name"].startswith(role)]
        grown = {name: cluster.counter(role, name) - before[role, name] for name in names}  # of both ranks
        assert [rank["name"] for rank in ranks] == [f"{role}-0 rank 0", f"{role}-0 rank 1"]
        assert sum(rank["ticks"] for rank in ranks) == grown["ticks"]
        assert sum(rank["computing_s"] for rank in ranks) == pytest.approx(grown["compute_us"] / 1e6, rel=0.01)
        assert sum(rank["in_flight_s"] for rank in ranks) == pytest.approx(grown["in_flight_us"] / 1e6, rel=0.05)
        for rank in ranks:
            parts = rank["computing_s"] + rank["waiting_s"] + rank["empty_s"]
            assert parts == pytest.approx(rank["in_flight_s"], abs=1e-5)
            assert 0 < rank["bubble_fraction"] < 1 and rank["control_us_per_tick"] > 0
    used = {process["name"]: process for process in made["processes"]}
    assert {"gateway", "prefill-0", "prefill-0 rank 1", "decode-0 rank 0"} <= set(used)
    assert all(0 < process["control_seconds"] <= process["cpu_seconds"] + 0.05 for process in used.values())


def test_top_shows_every_rank_once(cluster: Cluster) -> None:
    cluster.generate([11] * 20, 4)
    shown = run(cluster, "top", "--once")
    assert "TTFT p50" in shown and "prefill_forward" in shown
    for instance in ("prefill-0", "decode-0"):
        block = shown[shown.index(f"{instance}   ") :].splitlines()
        assert [line.split()[0] for line in block[2:4]] == ["0", "1"], block
        assert " of " in block[2]


def test_phases_of_some_requests_add_up_to_the_measured_ttft(cluster: Cluster) -> None:
    check_phases(cluster, requests=12, prompt=1500)
