"""A real gateway in front of scripted instances, all processes of their own; gone afterwards.

In: the pace of the decode instance. Out: the gateway's URL and process id and, after the block, when the instance told
each token. Raises `SystemExit` if the gateway does not serve in time.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

READY_WITHIN, GONE_WITHIN = 60.0, 20.0


@dataclass(slots=True)
class ScriptedGateway:
    url: str
    gateway_pid: int
    decode: str  # address of the decode instance
    stamps: dict[int, list[float]] = field(default_factory=dict)  # after the block: stream → moments


@contextmanager
def scripted_gateway(
    rate: float, batch: int, gateway_options: list[str], profile: Path | None = None, first_after: float = 0.0
) -> Iterator[ScriptedGateway]:
    """`profile`: the gateway runs under cProfile, which writes there."""
    children: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        children.append(subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True))
        return children[-1]

    def instance(*arguments: str) -> str:
        child = start("-m", "bench.scripted_instance", *arguments)
        assert child.stdout is not None
        return child.stdout.readline().strip()

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        stamps = Path(folder) / "stamps.json"
        try:
            prefill = instance("prefill", "--first-after", str(first_after))
            decode = instance("decode", "--rate", str(rate), "--batch", str(batch), "--stamps", str(stamps))
            port = free_port()
            profiled = ("-m", "cProfile", "-o", str(profile)) if profile is not None else ()
            gateway = start(
                *profiled, "-m", "paceline.cli", "gateway", "--prefill", prefill, "--decode", decode,
                "--port", str(port), *gateway_options,
            )  # fmt: skip
            running = ScriptedGateway(f"http://127.0.0.1:{port}", gateway.pid, decode)
            wait_until_healthy(running.url, lambda: gateway.poll() is None)
            yield running
        finally:
            for child in reversed(children):
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(GONE_WITHIN)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
        running.stamps = {int(stream): moments for stream, moments in json.loads(stamps.read_text()).items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_healthy(url: str, alive: Callable[[], bool]) -> None:
    until = time.monotonic() + READY_WITHIN
    while time.monotonic() < until and alive():
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("the gateway did not serve in time")
