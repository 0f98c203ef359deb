"""A pair of instances whose ranks are on "hosts" of their own: daemons that share nothing but loopback, over TCP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START = 180.0  # seconds to load on a busy machine
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"}


class GroupedPair:
    """One prefill and one decode instance of two ranks each, every rank in a daemon of its own, and a gateway."""

    def __init__(self, model: Path, *options: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="pg-")
        self.place = Path(self.folder.name)
        self.model, self.options = model, options
        self.parts: dict[str, subprocess.Popen[bytes]] = {}
        free = _free_ports(3)
        self.leaders = {"prefill": f"127.0.0.1:{free.pop()}", "decode": f"127.0.0.1:{free.pop()}"}
        self.ring_ports = {"prefill": _free_run(8), "decode": _free_run(8)}
        self.url = f"http://127.0.0.1:{free.pop()}"

    def __enter__(self) -> GroupedPair:
        try:
            for role in ("prefill", "decode"):
                for index in (0, 1):
                    self.start(role, index)
            gateway = ["gateway", "--prefill", self.leaders["prefill"], "--decode", self.leaders["decode"]]
            self._run("gateway", *gateway, "--port", self.url.rpartition(":")[2], "--model", str(self.model))
            self.until_serving()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts.values():
            part.send_signal(signal.SIGKILL)
        for part in self.parts.values():
            part.wait(30)
        self.folder.cleanup()

    def start(self, role: str, index: int) -> None:
        """A daemon in its own run folder, or the same one again."""
        listen = self.leaders[role] if index == 0 else "127.0.0.1:0"
        self._run(
            f"{role}-{index}", role, "--instance", f"{role}-0", "--listen", listen, "--pp", "2", "--group-size", "2",
            "--group-index", str(index), "--leader", self.leaders[role], "--ring-ports", str(self.ring_ports[role]),
            "--run-dir", str(self.place / f"{role}-{index}"), "--model", str(self.model), *self.options,
        )  # fmt: skip

    def _run(self, name: str, *arguments: str) -> None:
        with (self.place / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "paceline.cli", *arguments]
            self.parts[name] = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT, cwd=ROOT)

    def log(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text()

    def until_serving(self) -> None:
        deadline = time.monotonic() + START
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            assert time.monotonic() < deadline, {name: self.log(name)[-2000:] for name in self.parts}
            time.sleep(0.2)

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy token ids."""
        body = {"model": self.model.name, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens}
        body |= {"temperature": 0, "return_token_ids": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=280) as answer:
            ids: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return ids

    def status(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "paceline.cli", "status", "--json", "--address", *self.leaders.values()]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
        instances: list[dict[str, Any]] = json.loads(done.stdout)["instances"]
        return instances

    def tcp_endpoints(self, role: str) -> set[int]:
        """Ports of the ring that something listens on, counted from the first."""
        tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]  # an IPv4 address may be in the second
        lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
        listening = {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}
        return {port - self.ring_ports[role] for port in listening if 0 <= port - self.ring_ports[role] < 8}


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _free_run(count: int) -> int:
    """The first of `count` consecutive free ports."""
    while True:
        first = _free_ports(1)[0]
        held: list[socket.socket] = []
        try:
            held.extend(socket.create_server(("127.0.0.1", port)) for port in range(first, first + count))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for one in held:
                one.close()
