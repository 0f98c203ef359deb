"""A12, second part: whichever process is killed in mid-load, the report names it, everything comes back, and only the
gateway's own death reaches a client."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.prompts import prompts, reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
NAMED_WITHIN = 10.0  # seconds until the status names the culprit


def outcome(cluster: Cluster, prompt: list[int], wanted: list[int]) -> str:
    """ "right", "wrong", or the one error a client got."""
    try:
        return "right" if cluster.generate(prompt, 64) == wanted else "wrong"
    except urllib.error.HTTPError as error:
        return f"error {error.code}"
    except (urllib.error.URLError, OSError) as error:
        return f"error {error}"


def instance(cluster: Cluster, name: str) -> dict[str, Any]:
    return next(inst for inst in cluster.status()["instances"] if inst["instance"] == name)


def until(what: str, seconds: float, probe: Any) -> None:
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


@pytest.mark.parametrize(
    "victim",
    [
        *("prefill-0 rank 1", "decode-0 rank 0"),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("prefill-0 rank 0", "decode-0 rank 1")),
    ],
)
def test_a_killed_rank_is_named_and_its_instance_recovers(tiny: Path, victim: str) -> None:
    asked, wanted = prompts(tiny), reference(tiny, 64)
    name, rank = victim.split(" rank ")
    with Cluster("--chunk-size", "64", model=tiny) as cluster, ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(outcome, cluster, asked[i], wanted[i]) for i in (23, 22, 5, 23, 21, 22, 3, 4)]
        time.sleep(0.7)
        pid = next(pid for pid, known in cluster.pids().items() if known == victim)
        os.kill(pid, signal.SIGKILL)

        def named() -> bool:
            failure = instance(cluster, name)["last_failure"]
            return f"rank {rank} " in failure and "last launched tick" in failure

        until("the report names the rank", NAMED_WITHIN + 5, named)
        assert [job.result(120) for job in jobs] == ["right"] * 8
        until("serving under a new epoch", 60, lambda: instance(cluster, name)["serving"])
        assert instance(cluster, name)["epoch"] == 2 and instance(cluster, name)["restarts"] == 1
        until("the gateway sees it", 15, lambda: outcome(cluster, asked[2], wanted[2]) == "right")
        again = list(pool.map(lambda i: outcome(cluster, asked[i], wanted[i]), (23, 22, 5, 21)))
        assert again == ["right"] * 4
        cluster.assert_baseline()


def test_killed_daemons_and_gateway_come_back(tiny: Path) -> None:
    asked, wanted = prompts(tiny), reference(tiny, 64)
    with Cluster(model=tiny) as cluster, ThreadPoolExecutor(4) as pool:
        for victim in ("prefill-0", "decode-0", "gateway"):
            jobs = [pool.submit(outcome, cluster, asked[i], wanted[i]) for i in (23, 22, 5, 3)]
            time.sleep(0.7)
            before = cluster.pids()
            os.kill(next(pid for pid, known in before.items() if known == victim), signal.SIGKILL)
            outcomes = [job.result(120) for job in jobs]
            assert "wrong" not in outcomes
            assert victim == "gateway" or outcomes == ["right"] * 4
            until(f"{victim} again", 90, lambda: outcome(cluster, asked[2], wanted[2]) == "right")
            ranks = [pid for pid, known in before.items() if known.startswith(f"{victim} rank")]
            assert not any(Path(f"/proc/{pid}").exists() for pid in ranks), "a rank outlived its daemon"
        cluster.assert_baseline()
