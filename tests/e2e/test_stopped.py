"""A12, first part: whichever process stands still, no client waits for nothing, and the cluster recovers."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
NAMED_WITHIN = 12.0  # 10 s, and what a question takes on a busy machine
PATIENCE = 30.0  # seconds within which a client must have an error where there can be no answer
TOKENS = 2000


def ask(cluster: Cluster, answers: list[str]) -> None:
    try:
        answers.append("answered" if len(cluster.generate([5, 6, 7], TOKENS)) == TOKENS else "cut short")
    except (urllib.error.URLError, OSError) as error:
        answers.append(f"error: {error}")


def recovered(cluster: Cluster) -> bool:
    try:
        return len(cluster.generate([5, 6, 7], 4)) == 4
    except (urllib.error.URLError, OSError):
        return False


def when_failed(cluster: Cluster, instance: str, epochs: dict[str, int]) -> str:
    """The reason the instance gives for its restart, once it has noticed."""
    deadline = time.monotonic() + NAMED_WITHIN
    while True:
        for inst in cluster.status()["instances"]:
            if inst["instance"] == instance and inst["epoch"] > epochs[instance]:
                return str(inst["last_failure"])
        assert time.monotonic() < deadline, "nobody has noticed"
        time.sleep(0.3)


RANKS = ("prefill-0 rank 0", "prefill-0 rank 1", "decode-0 rank 0", "decode-0 rank 1")


@pytest.mark.parametrize(
    "victims",
    [
        ("prefill-0 rank 1", "decode-0", "gateway"),
        pytest.param((*RANKS, "prefill-0"), marks=pytest.mark.soak),
    ],
)
def test_only_a_stopped_gateway_costs_a_client_its_answer(tiny: Path, victims: tuple[str, ...]) -> None:
    with Cluster(model=tiny) as cluster:
        assert sorted(cluster.pids().values()) == sorted(["up", "gateway", "prefill-0", "decode-0", *RANKS])
        for name in victims:
            pid = next(pid for pid, other in cluster.pids().items() if other == name)
            epochs = {inst["instance"]: inst["epoch"] for inst in cluster.status()["instances"]}
            answers: list[str] = []
            client = threading.Thread(target=ask, args=(cluster, answers))
            client.start()
            time.sleep(1.0)  # the request is running
            os.kill(pid, signal.SIGSTOP)
            # A stopped prefill process is not needed by a request that decodes already; a new one is waiting.
            late: list[str] = []
            second = threading.Thread(target=ask, args=(cluster, late))
            second.start()
            deadline = time.monotonic() + PATIENCE
            if " rank " in name:  # which rank, and where it was
                failure = when_failed(cluster, name.split(" rank ")[0], epochs)
                assert f"rank {name[-1]} " in failure and "last launched tick" in failure, f"{name}: {failure}"
                assert "silent" in failure, failure
            for thread in (client, second):
                thread.join(max(0.1, deadline - time.monotonic()) if name == "gateway" else 150)
                assert not thread.is_alive(), f"{name}: a client waits for nothing"
            assert (answers + late == ["answered"] * 2) == (name != "gateway"), f"{name}: {answers} {late}"
            deadline = time.monotonic() + 90
            while not recovered(cluster):
                assert time.monotonic() < deadline, f"{name}: no recovery\n{cluster.output()}"
                time.sleep(1.0)
            cluster.assert_baseline()
