"""What `paceline up` starts, it keeps alive, and takes along when it goes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from paceline.cli import main
from paceline.config import Cluster, read_cluster

ROOT = Path(__file__).parents[2]


class Running:
    """A scripted cluster and what it has said so far."""

    def __init__(self, run_dir: Path, parts: tuple[str, ...]) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/paceline/scripted_cluster.py"), str(run_dir), *parts],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        )  # fmt: skip
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def hears(self, pattern: str) -> re.Match[str]:
        found = wait_for(lambda: re.search(pattern, self.said), f"{pattern!r} in:\n{self.said}")
        assert isinstance(found, re.Match)
        return found

    @property
    def cluster(self) -> Cluster:
        cluster = read_cluster(self.run_dir)
        assert cluster is not None
        return cluster

    def pid(self, name: str) -> int:
        return next(part.pid for part in self.cluster.parts if part.name == name)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ends(self) -> int:
        code = self.process.wait(20)
        self._reader.join(5)
        return code


def wait_for(condition: Callable[[], object], what: str, seconds: float = 15) -> object:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return result


def gone(processes: list[psutil.Process]) -> bool:
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


@contextmanager
def running(run_dir: Path, *parts: str) -> Iterator[Running]:
    cluster = Running(run_dir, parts)
    try:
        yield cluster
    finally:
        for process in [*cluster.family(), cluster.process] if cluster.process.poll() is None else []:
            process.kill()
        cluster.process.wait()


def test_a_cluster_becomes_ready_and_stops_leaving_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "prefill-0=child", "decode-0=", "gateway=") as up:
        up.hears(r"ready: http://127\.0\.0\.1:\d+  try: curl -sN http\S+/v1/chat/completions .*\n")
        assert up.said.count("ready:") == 1
        assert f"logs in {tmp_path / 'logs'}/" in up.said
        assert [part.name for part in up.cluster.instances] == ["prefill-0", "decode-0"]
        family = up.family()
        assert len(family) == 4  # three parts and the "rank"
        up.process.send_signal(signal.SIGINT)
        assert up.ends() == 0
        assert gone(family)
        assert "stopping (Ctrl-C again to stop at once)\n" in up.said
        assert "stopped" in up.said
        assert "restarting" not in up.said
        assert read_cluster(tmp_path) is None


def test_a_part_that_dies_is_started_again(tmp_path: Path) -> None:
    with running(tmp_path, "prefill-0=", "gateway=") as up:
        up.hears("ready:")
        before = up.pid("prefill-0")
        os.kill(before, signal.SIGKILL)
        up.hears(r"prefill-0 was killed by SIGKILL; restarting it in 0\.1 s \(log: .*prefill-0\.log\)")
        wait_for(lambda: up.pid("prefill-0") not in (0, before), "another process")


def test_what_a_dead_part_leaves_behind_is_ended(tmp_path: Path) -> None:
    with running(tmp_path, "prefill-0=child stubborn", "gateway=") as up:
        up.hears("ready:")
        log = tmp_path / "logs/prefill-0.log"
        rank = psutil.Process(int(re.findall(r"child (\d+)", log.read_text())[0]))
        os.kill(up.pid("prefill-0"), signal.SIGKILL)
        up.hears("prefill-0 was killed by SIGKILL")
        assert gone([rank])


@pytest.mark.parametrize("name", ["gateway", "prefill-0"])
def test_a_part_that_hangs_is_killed_and_started_again(name: str, tmp_path: Path) -> None:
    with running(tmp_path, "prefill-0=", "gateway=") as up:
        up.hears("ready:")
        before = up.pid(name)
        os.kill(before, signal.SIGSTOP)
        up.hears(rf"{name} did not answer for \d+ s and was killed; restarting")
        wait_for(lambda: up.pid(name) not in (0, before), "another process")
        assert not psutil.pid_exists(before)


def test_a_busy_part_is_alive(tmp_path: Path) -> None:
    with running(tmp_path, "prefill-0=", "gateway=busy") as up:
        up.hears("gateway +waiting for instances")
        time.sleep(1.5)  # longer than a silent part would live
        assert "ready:" not in up.said
        assert "restarting" not in up.said


def test_a_part_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, "prefill-0=stubborn child", "gateway=") as up:
        up.hears("ready:")
        family = up.family()
        up.process.terminate()
        assert up.ends() == 0
        assert gone(family)


def test_nothing_survives_the_sudden_death_of_up(tmp_path: Path) -> None:
    with running(tmp_path, "prefill-0=child", "decode-0=stubborn", "gateway=") as up:
        up.hears("ready:")
        family = up.family()
        assert len(family) == 4
        up.process.kill()
        wait_for(lambda: gone(family), "the end of all children", 5)


def test_a_part_that_cannot_start_ends_the_command_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/prefill-0.log").write_text("--- 2026-01-02 03:04:05 python -m old\nof an earlier run\n")
    with running(tmp_path, "prefill-0=broken", "gateway=") as up:
        family = up.family()
        assert up.ends() == 1
        assert "prefill-0 exited with 3; restarting it in 0.1 s" in up.said
        assert re.search(
            r"prefill-0 exited with 3; the end of .*prefill-0\.log:\n    the scripted reason\nstopping\n", up.said
        )
        assert gone(family)


def test_one_cluster_per_run_dir(tmp_path: Path) -> None:
    with running(tmp_path, "gateway=") as first:
        first.hears("ready:")
        with running(tmp_path, "gateway=") as second:
            assert second.ends() == 1
            assert f"a cluster already runs at {first.cluster.url} (pid {first.process.pid})" in second.said


def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            main(["up", "--port", str(port), "--model", str(tmp_path), "--run-dir", str(tmp_path / "run")])


def test_a_host_that_does_not_exist_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for port in ("0", "8000"):
        with pytest.raises(SystemExit, match=r"^paceline: cannot listen on --host nosuch\.invalid: [A-Z][a-z ]+$"):
            main(["up", "--host", "nosuch.invalid", "--port", port, "--model", str(tmp_path),
                  "--run-dir", str(tmp_path / "run")])  # fmt: skip


def test_a_missing_model_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no model in .*/nowhere \(config.json is missing\)"):
        main(["up", "--port", "0", "--model", str(tmp_path / "nowhere"), "--run-dir", str(tmp_path / "run")])
