"""The idle measurement sees work wherever it happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.idle_cpu import Usage, cluster_pids, measure, report, short_name
from paceline.config import Cluster, Part

BUSY_GRANDCHILD = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import threading\\ndef spin():\\n  while True: pass\\nthreading.Thread(target=spin).start()"])
"""


def test_a_busy_thread_of_a_grandchild_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY_GRANDCHILD], start_new_session=True) as parent:
        try:
            time.sleep(0.7)
            usages = measure([parent.pid], 0.5)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert len(usages) == 2
    assert usages[0].percent < 20 < usages[1].percent


def test_a_process_that_ends_meanwhile_spoils_the_measurement() -> None:
    with subprocess.Popen(["sleep", "0.1"]) as brief:
        with pytest.raises(SystemExit, match="ended during the measurement"):
            measure([brief.pid], 0.3)


def test_the_limit_decides(capsys: pytest.CaptureFixture[str]) -> None:
    usages = [Usage(1, "a", 1.5), Usage(2, "b", 1.4)]
    assert report(usages, 3) == 0
    assert report(usages, 2.8) == 1
    assert "  2.90 %  of one core in total; the limit is 3 %" in capsys.readouterr().out


def test_the_parts_of_a_cluster_are_found(tmp_path: Path) -> None:
    parts = [
        Part(name="p", role="prefill", address="a:1", log="l", pid=7),
        Part(name="g", role="gateway", address="a:2", log="l", pid=8),
    ]
    Cluster(up_pid=1, url="u", model_name="m", parts=parts).write(tmp_path)
    assert cluster_pids(tmp_path) == [7, 8]
    with pytest.raises(SystemExit, match="no cluster runs"):
        cluster_pids(tmp_path / "elsewhere")


def test_processes_have_readable_names() -> None:
    assert (
        short_name(["/usr/bin/python", "-m", "pipeline.io.birth", "12", "decode.io.rank_process", ""])
        == "decode.io.rank_process"
    )
    assert short_name(["python", "-m", "gateway.app", "--model", "x"]) == "gateway.app"
    assert short_name(["/bin/sleep", "9", ""]) == "sleep 9"
