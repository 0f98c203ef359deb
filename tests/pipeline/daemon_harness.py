"""Starts real instance daemons with scripted ranks for tests, and waits for things with generous deadlines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    bootstrap_pb2,
    bootstrap_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
)
from security.channels import dial_blocking
from security.secrets import load_if

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
T = TypeVar("T")


def eventually(what: str, probe: Callable[[], T]) -> T:
    """The first true value of `probe`; a test failure naming `what` after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        value = probe()
        if value:
            return value
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """A zombie that nobody reaps does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def request(prompt: list[int], name: str = "r", peer: str = "other", **sampling: Any) -> generation_pb2.GenerateRequest:
    """A well-formed request but for what the caller makes of it."""
    params = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 8} | sampling
    return generation_pb2.GenerateRequest(
        request_id=name,
        prompt_ids=prompt,
        sampling=generation_pb2.SamplingParams(**params),
        peer=common_pb2.InstanceRef(instance_id=peer, address="10.0.0.2:1", epoch=1),
    )


class Daemon:
    """One running daemon. `ranks` scripts start-up: {rank: {...}}, see `scripted_rank`."""

    def __init__(self, folder: Path, role: str = "prefill", ranks: dict[int, Any] | None = None, **config: Any) -> None:
        self.model = folder / "model"
        self.model.mkdir(exist_ok=True)
        for rank, script in (ranks or {}).items():
            (self.model / f"rank{rank}.json").write_text(json.dumps(script))
        self._log_file = folder / "log"
        self._log_start = self._log_file.stat().st_size if self._log_file.exists() else 0
        settings = {"instance": f"{role}-0", "model": str(self.model), "run_dir": str(folder / "run"), "pp_size": 2}
        config_file = folder / "config.json"
        config_file.write_text(json.dumps(settings | config))
        with self._log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.pipeline.scripted_daemon", role, str(config_file)],
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
            )
        self._channel: grpc.Channel | None = None
        self._secrets: str = config.get("secrets", "")

    @property
    def log(self) -> str:
        """What this daemon wrote, not those before it in the same folder."""
        return self._log_file.read_bytes()[self._log_start :].decode()

    @property
    def channel(self) -> grpc.Channel:
        if self._channel is None:
            found = eventually("the daemon's address", lambda: re.findall(r"instance at (\S+),", self.log))
            self._channel = dial_blocking(found[-1], load_if(self._secrets))
        return self._channel

    def describe(self) -> bootstrap_pb2.DescribeResponse:
        stub = bootstrap_pb2_grpc.BootstrapStub(self.channel)
        return stub.Describe(bootstrap_pb2.DescribeRequest(), wait_for_ready=True, timeout=DEADLINE_S)

    def status(self) -> admin_pb2.StatusResponse:
        return self.admin.Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S)

    @property
    def admin(self) -> admin_pb2_grpc.AdminStub:
        return admin_pb2_grpc.AdminStub(self.channel)

    def health(self, service: str = "") -> int:
        asked = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(self.channel).Check(asked, timeout=DEADLINE_S).status

    def generate(self, message: generation_pb2.GenerateRequest) -> Any:
        return generation_pb2_grpc.GenerationStub(self.channel).Generate(message, timeout=DEADLINE_S)

    def abort(self, name: str) -> None:
        message = generation_pb2.AbortRequest(request_id=name, reason="stop string")
        generation_pb2_grpc.GenerationStub(self.channel).Abort(message, timeout=DEADLINE_S)

    def when_serving(self, epoch: int = 1) -> Daemon:
        """Waits until it serves under `epoch` or a later one."""

        def probe() -> bool:
            assert self.process.poll() is None, self.log
            described = self.describe()
            return described.serving and described.instance.epoch >= epoch

        eventually(f"serving in epoch {epoch}", probe)
        return self

    def pids(self) -> list[int]:
        return [rank.pid for rank in self.status().ranks]

    def heard(self, rank: int) -> str:
        file = self.model / f"rank{rank}.heard"
        return file.read_text() if file.exists() else ""

    def wait(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
