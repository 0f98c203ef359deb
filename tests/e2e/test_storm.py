"""A1, D1, D2 with real processes: abort storms and a pool that is too small leave every rank in agreement."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.prompts import prompts, reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


def stream_then_leave(cluster: Cluster, prompt: list[int], tokens: int, leave_after: float | None) -> list[int] | None:
    """Streams a greedy completion; with `leave_after` hangs up at that moment and returns None."""
    place = urlsplit(cluster.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=leave_after or 280)
    body = {
        "model": cluster.model, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    ids: list[int] = []
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        deadline = None if leave_after is None else time.monotonic() + leave_after
        for line in answer:
            if deadline is not None and time.monotonic() > deadline:
                return None
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                ids += event["choices"][0]["token_ids"] if event["choices"] else []
    except TimeoutError:
        assert leave_after is not None
        return None
    finally:
        connection.close()
    return ids if leave_after is None else None


def storm(cluster: Cluster, model: Path, requests: int, seconds: float, at_once: int) -> None:
    """Half of the requests leave at random moments; the other half must get the reference's tokens."""
    chance = random.Random(5)
    asked, wanted = prompts(model)[:-1], reference(model, 64)
    shared = asked[-1][:200]  # shared prefixes: what differs comes after 200 equal tokens
    jobs = [(chance.randrange(len(asked)), chance.random() < 0.5, chance.random() * 4) for _ in range(requests)]
    started = time.monotonic()
    wrong: list[str] = []

    def run(job: tuple[int, bool, float]) -> None:
        which, leaves, moment = job
        if leaves:
            stream_then_leave(cluster, shared + asked[which], 200, 0.05 + moment)
        elif stream_then_leave(cluster, asked[which], 64, None) != wanted[which]:
            wrong.append(f"prompt {which}")

    rounds = 0
    while rounds == 0 or time.monotonic() - started < seconds:
        with ThreadPoolExecutor(at_once) as pool:
            for _ in pool.map(run, jobs):
                pass
        rounds += 1
    assert wrong == []
    cluster.assert_baseline()
    assert "fail-stop" not in cluster.log_of("prefill-0") + cluster.log_of("decode-0")


def test_a_short_abort_storm(tiny: Path) -> None:
    with Cluster("--chunk-size", "64", model=tiny, prefill_pp=2, decode_pp=3) as cluster:
        storm(cluster, tiny, requests=60, seconds=0, at_once=12)


@pytest.mark.soak
def test_an_abort_storm_on_4x4_for_five_minutes(tiny: Path) -> None:
    with Cluster("--chunk-size", "64", model=tiny, prefill_pp=4, decode_pp=4) as cluster:
        storm(cluster, tiny, requests=400, seconds=300, at_once=16)


def test_a_pool_too_small_for_all_retracts_and_changes_no_token(tiny: Path) -> None:
    asked, wanted = prompts(tiny), reference(tiny, 64)
    short = [i for i, prompt in enumerate(asked) if len(prompt) < 40]
    # 24 pages of 16 hold about four of these requests at their full length.
    with Cluster("--pages", "24", "--max-model-len", "384", model=tiny) as cluster:
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda i: cluster.generate(asked[i], 64), short))
        assert [i for i, got in zip(short, answers, strict=True) if got != wanted[i]] == []
        counters = cluster.ranks("decode")[0]["counters"]
        assert counters["retracted"] == counters["resumed"] > 0, "the pool was not too small"
        cluster.assert_baseline()
        assert all(rank["counters"]["host_bytes"] == 0 for rank in cluster.ranks("decode"))


def test_concurrent_status_and_load_do_not_disturb_each_other(tiny: Path) -> None:
    """A11: the admin surface while busy."""
    asked, wanted = prompts(tiny), reference(tiny, 64)
    with Cluster(model=tiny) as cluster:
        done = threading.Event()
        seen: list[int] = []

        def watch() -> None:
            while not done.is_set():
                seen.append(len(cluster.status()["instances"]))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            answers = cluster.generate_all(asked[:12], 64, at_once=6)
        finally:
            done.set()
            watcher.join()
        assert answers == wanted[:12]
        assert seen and set(seen) == {2}
        cluster.assert_baseline()
