"""A real cluster for tests: `paceline up` as a user runs it, and what its ranks say of themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

START = 180.0  # seconds a cluster may take to load on a busy machine
# Seconds until everything of ended requests must be gone: pages that a dead peer might still write to wait for
# its restart and then for its tail of 20 s.
SETTLE = 90.0


class Cluster:
    """Starts on `with`; every process is gone after it."""

    def __init__(self, *options: str, model: Path | None = None, prefill_pp: int = 2, decode_pp: int = 2) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="pl-")
        chosen = ["--model", str(model)] if model else []
        self.command = [
            sys.executable, "-m", "paceline.cli", "up", "--port", "0", "--run-dir", self.folder.name, *chosen,
            "--prefill-pp", str(prefill_pp), "--decode-pp", str(decode_pp), *options,
        ]  # fmt: skip

    def __enter__(self) -> Cluster:
        root = Path(__file__).parents[2]
        env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'proto'}"}
        self.log = open(Path(self.folder.name) / "up.log", "w+")
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=subprocess.STDOUT, env=env)
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        pids = self.pids()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        self.log.close()
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        self.folder.cleanup()
        assert not alive, f"processes left behind: {alive}"

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            if "ready: " in self.output():
                self.record = self._read_record()
                self.url, self.model = self.record["url"], self.record["model_name"]
                return
            assert self.process.poll() is None, self.output()
            time.sleep(0.2)
        raise AssertionError(f"not ready after {START:g} s:\n{self.output()}")

    def _read_record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((Path(self.folder.name) / "cluster.json").read_text())
        return record

    def output(self) -> str:
        """What `paceline up` printed."""
        return Path(self.log.name).read_text()

    def log_of(self, part: str) -> str:
        return (Path(self.folder.name) / "logs" / f"{part}.log").read_text()

    # -- requests ----------------------------------------------------------------------------------

    def post(self, path: str, body: dict[str, Any], timeout: float = 120.0) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            result: dict[str, Any] = json.load(answer)
        return result

    def generate(self, prompt: list[int], tokens: int, **options: Any) -> list[int]:
        """Greedy token ids through the gateway."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
        answer = self.post("/v1/completions", body | {"return_token_ids": True} | options, 280)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def generate_all(self, prompts: list[list[int]], tokens: int, at_once: int) -> list[list[int]]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, tokens), prompts))

    # -- what the ranks say ------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "paceline.cli", "status", "--json", "--run-dir", self.folder.name]
        root = Path(__file__).parents[2]
        env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'proto'}"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30, env=env)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def ranks(self, role: str) -> list[dict[str, Any]]:
        return [rank for inst in self.status()["instances"] if inst["role"] == role for rank in inst["ranks"]]

    def counter(self, role: str, name: str) -> int:
        """Summed over the ranks of a role."""
        return sum(rank["counters"].get(name, 0) for rank in self.ranks(role))

    def pids(self) -> dict[int, str]:
        """pid → name of every process of the cluster."""
        found = {self.process.pid: "up"}
        try:
            for part in self._read_record()["parts"]:  # a part that was started again has another pid
                found[part["pid"]] = part["name"]
            for inst in self.status()["instances"]:
                for rank in inst["ranks"]:
                    found[rank["pid"]] = f"{inst['instance']} rank {rank['rank']}"
        except (FileNotFoundError, AssertionError, subprocess.TimeoutExpired):
            pass  # it never came up
        return found

    def assert_baseline(self) -> None:
        """Invariant 4 on real ranks: pages, rooms, store entries, handles and queues are as after the start."""
        deadline = time.monotonic() + SETTLE
        while found := self._left_over():
            assert time.monotonic() < deadline, found
            time.sleep(0.5)

    def _left_over(self) -> list[str]:
        found = []
        for inst in self.status()["instances"]:
            for rank in inst["ranks"]:
                name = f"{inst['instance']} rank {rank['rank']}"
                pages = rank["pages"]
                if not rank["answered"] or rank["audit"] or pages["free"] != sum(pages.values()):
                    found.append(f"{name}: answered {rank['answered']}, pages {pages} {rank['audit']}")
                busy = {k: v for k, v in rank["queues"].items() if v and k != "log_unacknowledged"}
                busy |= {k: v for k, v in rank["requests"].items() if v}
                busy |= {k: rank[k] for k in ("rooms", "store_entries", "transfer_handles") if rank[k]}
                if busy:
                    found.append(f"{name}: {busy}")
            if len({(rank["applied_seq"], rank["digest"]) for rank in inst["ranks"]}) > len(
                {rank["applied_seq"] for rank in inst["ranks"]}
            ):
                found.append(f"{inst['instance']}: digests differ at one seq")
        return found
