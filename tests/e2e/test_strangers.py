"""G8: every open port fed random bytes, huge lengths, half messages and slow writers, by strangers.

A real cluster goes on answering with the reference's tokens meanwhile. Afterwards it is as it was: the same processes,
no memory and no descriptors more, nothing held for anyone, and what was dropped is counted.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc
from security.channels import dial_blocking
from security.folder import make
from security.secrets import Secrets
from tests.e2e.cluster import Cluster
from tests.e2e.strangers.attack import call, knock, speak_link
from tests.e2e.strangers.ports import Port, Use, open_ports, use

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROMPT = [(7 * i) % 1000 + 5 for i in range(40)]
TOKENS = 12
MEMORY = 64 << 20  # bytes that a process may have more than after the first strangers
DESCRIPTORS = 4
LOG = 64 << 10  # bytes that a part may write meanwhile
PATIENCE = 60.0  # seconds until greetings that never came are given up


def link_addresses(cluster: Cluster, secrets: Secrets | None) -> tuple[list[str], list[str]]:
    """Of the peer links, and of the daemons' gRPC."""
    daemons = [part["address"] for part in cluster.record["parts"] if part["role"] != "gateway"]
    links = []
    for address in daemons:
        with dial_blocking(address, secrets) as channel:
            told = bootstrap_pb2_grpc.BootstrapStub(channel).Describe(bootstrap_pb2.DescribeRequest(), timeout=10)
        links += [rank.link_address for rank in told.ranks if rank.link_address]
    return links, daemons


def assault(cluster: Cluster, frames: int, seed: int, secrets: Secrets | None, stranger: Secrets | None) -> int:
    """An equal share of raw connections for every port; the rest is in the manner of ZMQ and gRPC."""
    links, daemons = link_addresses(cluster, secrets)
    ports = open_ports(cluster.pids())
    check_all_kinds(ports)
    each = max(8, frames // 4 // len(ports))
    calls = frames // 10
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(knock, port, each, seed) for port in ports]
        jobs.append(pool.submit(call, daemons, calls, seed, secrets))
        jobs.append(pool.submit(speak_link, links, max(0, frames - calls - each * len(ports)), seed, stranger))
        return sum(job.result() for job in jobs)


def check_all_kinds(ports: list[Port]) -> None:
    """The gateway's HTTP, each daemon's gRPC and control socket, each rank's link and transfer ports, the ring."""
    tcp = {port.process for port in ports if not isinstance(port.address, str)}
    assert {"gateway", "prefill-0", "decode-0", "prefill-0 rank 0", "decode-0 rank 0"} <= tcp, ports
    local = [port.address for port in ports if isinstance(port.address, str)]
    for name in ("/control", "/relay", "/returns", "/store"):
        assert any(name in str(address) for address in local), (name, ports)


class Honest:
    """A client who asks for the same all the time."""

    def __init__(self, cluster: Cluster, wanted: list[int]) -> None:
        self.wrong: list[Any] = []
        self.answers = 0
        self._cluster, self._wanted = cluster, wanted
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                if (got := self._cluster.generate(PROMPT, TOKENS)) != self._wanted:
                    self.wrong.append(got)
                self.answers += 1
            except Exception as error:
                self.wrong.append(repr(error))


def dropped(cluster: Cluster) -> int:
    names = (
        "frames_dropped",
        "peers_refused",
        "rooms_unauthorized",
        "daemon_frames_dropped",
        "daemon_messages_malformed",
    )
    ranks = [rank for instance in cluster.status()["instances"] for rank in instance["ranks"]]
    return sum(rank["counters"].get(name, 0) for rank in ranks for name in names)


def kind(line: str) -> str:
    """A line of a log without its numbers."""
    return re.sub(r"[0-9a-f]*[0-9]+[0-9a-f]*", "#", line)[:160]


def grown(before: dict[int, Use], after: dict[int, Use], names: dict[int, str]) -> list[str]:
    return [
        f"{names[pid]}: {before[pid]} became {now}"
        for pid, now in after.items()
        if now.memory > before[pid].memory + MEMORY or now.descriptors > before[pid].descriptors + DESCRIPTORS
    ]


def withstand(cluster: Cluster, frames: int, secrets: Secrets | None, stranger: Secrets | None) -> None:
    wanted = cluster.generate(PROMPT, TOKENS)
    warm = assault(cluster, frames // 8, 1, secrets, stranger)
    cluster.assert_baseline()
    names = cluster.pids()
    before, counted = use(names), dropped(cluster)
    with Honest(cluster, wanted) as honest:
        sent = assault(cluster, frames - warm, 2, secrets, stranger)
    assert warm + sent >= frames
    assert honest.answers and not honest.wrong, honest.wrong
    assert cluster.generate(PROMPT, TOKENS) == wanted
    cluster.assert_baseline()
    assert cluster.pids() == names, "nothing was started anew"
    assert [instance["restarts"] for instance in cluster.status()["instances"]] == [0, 0]
    assert dropped(cluster) > counted
    logs = [Path(part["log"]).read_text(errors="replace") for part in cluster.record["parts"]]
    assert max(map(len, logs)) < LOG, Counter(kind(line) for text in logs for line in text.splitlines()).most_common(5)
    deadline = time.monotonic() + PATIENCE
    while found := grown(before, use(names), names):
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


@pytest.fixture(params=["open", "secured"])
def secrets(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Secrets | None:
    made = make(tmp_path / "secrets") if request.param == "secured" else None
    monkeypatch.setenv("PACELINE_SECRETS", str(made.folder) if made else "")
    return made


def _cluster(model: Path) -> Cluster:
    return Cluster("--transfer-backend", "stream", model=model, prefill_pp=2, decode_pp=2)


def test_G8_strangers_at_every_port_change_nothing(tiny: Path) -> None:
    with _cluster(tiny) as cluster:
        withstand(cluster, 3_000, None, None)


@pytest.mark.fuzz
def test_G8_a_hundred_thousand_frames_at_every_port_change_nothing(
    tiny: Path, secrets: Secrets | None, tmp_path: Path
) -> None:
    """Half of them where every frame reaches a parser, half where the cluster has secrets and strangers have others."""
    stranger = make(tmp_path / "stranger") if secrets else None
    with _cluster(tiny) as cluster:
        withstand(cluster, 50_000, secrets, stranger)
