"""G5: whatever dies while it serves, every client's stream goes on with the right next token and ends as if nothing was."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.prompts import prompts, reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TOKENS = 64
# Every way to choose tokens that depends on what was chosen before, or on chance.
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 11, "top_p": 0.95},
    {"temperature": 1.2, "seed": 12, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.7, "seed": 13, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
]

OnToken = Callable[[int, dict[str, str]], None]  # how many tokens came so far; the answer's headers


def stream(cluster: Cluster, prompt: list[int], on_token: OnToken | None = None, **options: Any) -> list[int]:
    """The token ids of one streamed answer; an error, in whatever form, is an AssertionError."""
    place = urlsplit(cluster.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=200)
    body = {
        "model": cluster.model, "prompt": prompt, "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0,
        "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    ids: list[int] = []
    try:
        connection.request("POST", "/v1/completions", json.dumps(body | options), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        headers = dict(answer.getheaders())
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                ids += choice["token_ids"]
                if on_token is not None and choice["token_ids"]:
                    on_token(len(ids), headers)
            if event.get("usage"):
                usage = event["usage"]
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(ids))
    finally:
        connection.close()
    return ids


def metric(cluster: Cluster, name: str) -> float:
    """Summed over its labels."""
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"paceline_gateway_{name}"))


class Killer:
    """Kills one process, once, when the first stream is so far."""

    def __init__(self, pids: dict[str, int], part: str, rank: int | None, after: int) -> None:
        self.killed = threading.Event()
        self._pids, self._part, self._rank, self._after = pids, part, rank, after
        self._lock = threading.Lock()

    def __call__(self, count: int, headers: dict[str, str]) -> None:
        if count >= self._after:
            self.kill(headers[f"X-Paceline-{self._part.capitalize()}"])

    def kill(self, instance: str) -> None:
        with self._lock:
            if not self.killed.is_set():
                name = instance if self._rank is None else f"{instance} rank {self._rank}"
                os.kill(self._pids[name], signal.SIGKILL)
                self.killed.set()


class Case:
    """Eight different streams at once, and what each must tell."""

    def __init__(self, cluster: Cluster, model: Path) -> None:
        self.cluster = cluster
        asked, wanted = prompts(model), reference(model, TOKENS)
        picked = (23, 22, 5, 3)
        self.jobs: list[tuple[list[int], dict[str, Any]]] = [(asked[i], {}) for i in picked] + [
            (asked[i], options) for i, options in zip((4, 21, 6, 22), SAMPLED, strict=True)
        ]
        # What a seed gives is compared with the same cluster's undisturbed answer.
        self.wanted = [wanted[i] for i in picked] + [
            stream(cluster, prompt, **options) for prompt, options in self.jobs[len(picked) :]
        ]

    def pids(self) -> dict[str, int]:
        return {name: pid for pid, name in self.cluster.pids().items()}

    def check(self, on_token: OnToken | None, meanwhile: Callable[[], None] = lambda: None) -> None:
        """All eight at once, with `meanwhile` once they are sent."""
        with ThreadPoolExecutor(len(self.jobs)) as pool:
            answers = [pool.submit(stream, self.cluster, p, on_token, **options) for p, options in self.jobs]
            meanwhile()
            got = [answer.result(200) for answer in answers]
        assert [i for i, (ids, want) in enumerate(zip(got, self.wanted, strict=True)) if ids != want] == []

    def metric(self, name: str) -> float:
        return metric(self.cluster, name)

    def settle(self) -> None:
        """Everything serves again, and the gateway has seen it."""
        deadline = time.monotonic() + 90
        instances = len(self.cluster.status()["instances"])
        while self.metric("serving_instances") < instances or not all(
            instance["serving"] for instance in self.cluster.status()["instances"]
        ):
            assert time.monotonic() < deadline, self.cluster.output()
            time.sleep(0.3)
        self.check(None)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.soak)], ids=["one pair", "2x2 pairs"])
def case(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Case]:
    count = str(request.param)
    options = ("--chunk-size", "64", "--prefill-instances", count, "--decode-instances", count)
    with Cluster(*options, model=tiny) as cluster:
        case = Case(cluster, tiny)
        yield case
        cluster.assert_baseline()


@pytest.mark.parametrize(
    ("rank", "after"),
    [(1, 2), (None, 17)]
    + [
        pytest.param(*more, marks=pytest.mark.soak)
        for more in [(0, 1), (0, 2), (0, 17), (1, 1), (1, 17), (None, 1), (None, 2)]
    ],
)
def test_decode_dies_in_mid_stream(case: Case, rank: int | None, after: int) -> None:
    before = case.metric("resumed_requests_total")
    killer = Killer(case.pids(), "decode", rank, after)
    case.check(killer)
    assert killer.killed.is_set()
    assert case.metric("resumed_requests_total") > before
    case.settle()


@pytest.mark.parametrize("rank", [1, *(pytest.param(one, marks=pytest.mark.soak) for one in (0, None))])
def test_prefill_dies_before_the_transfer(case: Case, rank: int | None) -> None:
    killer = Killer(case.pids(), "prefill", rank, 0)
    before = case.metric("resumed_requests_total")
    case.check(None, lambda: killer.kill("prefill-0"))
    assert case.metric("resumed_requests_total") > before
    case.settle()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_prefill_dies_during_the_transfer(case: Case, rank: int) -> None:
    """Other streams have their first token; the prompt of 3 000 is being computed and sent, chunk by chunk."""
    killer = Killer(case.pids(), "prefill", rank, 1)
    before = case.metric("resumed_requests_total")
    case.check(killer)
    assert killer.killed.is_set() and case.metric("resumed_requests_total") > before
    case.settle()


def test_prefill_dies_after_the_transfer(case: Case) -> None:
    """What decodes already goes on as if nothing was."""
    killer = Killer(case.pids(), "prefill", 1, 30)
    case.check(killer)
    assert killer.killed.is_set()
    case.settle()


def test_both_sides_die(case: Case) -> None:
    pids = case.pids()
    first, second = Killer(pids, "decode", 1, 3), Killer(pids, "prefill", 0, 5)

    def both(count: int, headers: dict[str, str]) -> None:
        first(count, headers)
        second(count, headers)

    case.check(both)
    assert first.killed.is_set() and second.killed.is_set()
    case.settle()


def test_D3_host_memory_full_in_retract_is_computed_again(tiny: Path) -> None:
    asked, wanted = prompts(tiny), reference(tiny, TOKENS)
    short = [i for i, prompt in enumerate(asked) if len(prompt) < 40]
    # 24 pages of 16 hold about four of these requests at their full length.
    options = ("--pages", "24", "--max-model-len", "384", "--host-memory", "1")
    with Cluster(*options, model=tiny) as cluster:
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda i: stream(cluster, asked[i]), short))
        assert [i for i, got in zip(short, answers, strict=True) if got != wanted[i]] == []
        assert metric(cluster, "resumed_requests_total") > 0, "the pool was not too small"
        cluster.assert_baseline()
