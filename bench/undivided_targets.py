"""What is compared: a pair of `paceline up`, and the same engine without disaggregation behind the same gateway.

In: options. Out: a `Target`, ready, of processes of its own; gone afterwards. Raises `SystemExit` if they do not start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.idle_cpu import cluster_pids, descendants, read_sample
from bench.local_cluster import started_cluster
from bench.scripted_gateway import GONE_WITHIN, free_port, wait_until_healthy

# One rank each side, so that both have one thread that computes; no option else is set.
PAIR = ["--prefill-pp", "1", "--decode-pp", "1"]


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    pids: tuple[int, ...]  # with those below them all that it consists of, the gateway included

    def cpu_seconds(self) -> float:
        """User and system time of all its processes."""
        everything = [pid for root in self.pids for pid in descendants(root)]
        return sum(sample.seconds for pid in everything if (sample := read_sample(pid)) is not None)


def default_model() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "paceline" / "SmolLM2-135M-Instruct"


@contextmanager
def pair(model: Path) -> Iterator[Target]:
    with started_cluster([*PAIR, "--model", str(model)]) as cluster:
        yield Target(cluster.url, tuple(cluster_pids(cluster.run_dir)))


@contextmanager
def undivided(model: Path, threads: int = 1, chunk_size: int = 512) -> Iterator[Target]:
    engine = ["bench.undivided_server", str(model), "--threads", str(threads), "--chunk-size", str(chunk_size)]
    with ExitStack() as stack:
        server = stack.enter_context(_child(engine, OMP_NUM_THREADS=str(threads)))
        assert server.stdout is not None
        prefill, decode = server.stdout.readline().strip(), server.stdout.readline().strip()
        if not decode:
            raise SystemExit("bench.undivided_server did not start")
        port = free_port()
        sides = ["--prefill", prefill, "--decode", decode]
        gateway = stack.enter_context(
            _child(["paceline.cli", "gateway", *sides, "--port", str(port), "--model", str(model)])
        )
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, lambda: gateway.poll() is None)
        yield Target(url, (server.pid, gateway.pid))


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started meanwhile keeps to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _child(module: list[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *module], stdout=subprocess.PIPE, text=True, env={**os.environ, **more}
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GONE_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
