"""Clusters that a measurement starts for itself, with `paceline up`."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_WITHIN = 300.0
SETTLE = 5.0  # after start-up, caches and connections still move


@dataclass(frozen=True, slots=True)
class LocalCluster:
    run_dir: Path
    url: str


@contextmanager
def started_cluster(options: list[str]) -> Iterator[LocalCluster]:
    """A cluster of its own, ready; gone afterwards. Raises `SystemExit` if it does not start."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        command = [sys.executable, "-m", "paceline.cli", "up", "--port", "0", "--run-dir", folder, *options]
        up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        too_late = threading.Timer(READY_WITHIN, up.terminate)
        too_late.start()
        try:
            assert up.stdout is not None
            while not (line := up.stdout.readline()).startswith("ready:"):
                if not line:
                    raise SystemExit("the cluster did not start")
            too_late.cancel()
            time.sleep(SETTLE)
            yield LocalCluster(Path(folder), line.split()[1])
        finally:
            too_late.cancel()
            up.send_signal(signal.SIGTERM)
            try:
                up.wait(30)
            except subprocess.TimeoutExpired:
                up.kill()
                up.wait()
