"""A rendered chart, running: every pod is a network namespace in which its container's command runs as a kubelet starts it.

In: values of the chart and the path between hosts. Out: pods that can be asked, ended and started again, also at another
address. Invariant: what is told to a process is what the chart tells it; only the image's own paths are replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import IO, Any

from engine.smollm2 import DEFAULT_MODEL_NAME, cache_folder
from tests.deploy import tools
from tests.deploy.variants import ROOT, render
from tests.net.lab import Lab
from tests.net.pods import Pod, enforce, environment, names, pods_of
from tests.net.switch import Path

CLIENT = "client"
GATEWAY = "prod-paceline-gateway-0"
PATIENCE_S = 180.0

# Prints the text of a streamed completion, the last line; "…" after each piece, so that a reader sees it go on.
STREAM = """
import json, sys, urllib.request
url, prompt, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "ignore_eos": True}
request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
text = ""
for line in urllib.request.urlopen(request, timeout=300):
    if line.startswith(b"data: {"):
        chunk = json.loads(line[6:])
        if "error" in chunk:
            sys.exit("error: " + json.dumps(chunk))
        text += "".join(choice["text"] for choice in chunk["choices"])
        print("…", flush=True)
print(json.dumps(text), flush=True)
"""
HEALTH = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1] + "/health", timeout=5).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""


class Deployment:
    def __init__(self, values: tuple[str, ...], path: Path) -> None:
        self.objects = render(tools.ensure().helm, (*values, f"model.path={cache_folder() / DEFAULT_MODEL_NAME}"))
        self.pods = {pod.name: pod for pod in [*pods_of(self.objects), Pod(CLIENT, {})]}
        self._folder = FilePath(tempfile.mkdtemp(prefix="pn"))  # short: sockets lie below it
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._logs: dict[str, IO[str]] = {}
        command = self._folder / "paceline"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline.cli "$@"\n')
        command.chmod(0o755)
        self.lab = Lab(list(self.pods), path)
        self._publish()

    def __enter__(self) -> Deployment:
        for name, pod in self.pods.items():
            if pod.container:
                self.start(name)
        return self

    def __exit__(self, *exception: object) -> None:
        self.lab.close()
        for log in self._logs.values():
            log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- pods

    def start(self, name: str, replace: Sequence[tuple[str, str]] = ()) -> None:
        """`replace`: arguments that an update has changed."""
        pod = self.pods[name]
        number = str(list(self.pods).index(name))
        given = environment(pod, self.lab.addresses[name])
        variables = {
            "PATH": f"{self._folder}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "OMP_NUM_THREADS": "1",
            **given, "PACELINE_RUN_DIR": str(self._folder / number), "HOME": str(FilePath.home()),
        }  # fmt: skip
        changed = dict(replace)
        arguments = [changed.get(argument, argument) for argument in pod.container["args"]]
        log = self._logs.setdefault(name, (self._folder / f"{name}.log").open("a+"))
        self._running[name] = self.lab.start(
            name, [str(ROOT / "deploy/image/paceline-pod"), *arguments], variables, log
        )

    def end(self, name: str, number: signal.Signals = signal.SIGTERM, timeout: float = 60) -> int:
        process = self._running.pop(name)
        process.send_signal(number)
        return process.wait(timeout)

    def replace(self, name: str, address: str) -> None:
        """Another pod of the same name: another address, and nothing on its disk."""
        shutil.rmtree(self._folder / str(list(self.pods).index(name)), ignore_errors=True)
        self.lab.readdress(name, address)
        self._publish()
        self.start(name)

    def group(self, name: str) -> list[str]:
        return [other for other in self.pods if other.rpartition("-")[0] == name]

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def _publish(self) -> None:
        """Names and policies follow the pods."""
        pods = list(self.pods.values())
        for name in self.pods:
            self.lab.name_all(name, names(self.objects, pods, self.lab.addresses))
        enforce(self.lab, self.objects, pods)

    # ---- a client

    @property
    def url(self) -> str:
        return f"http://{self.lab.addresses[GATEWAY]}:8000"

    def _client(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        return self.lab.start(CLIENT, [sys.executable, "-c", code, self.url, *arguments], os.environ, sys.stderr)

    def stream(self, prompt: str, tokens: int) -> subprocess.Popen[str]:
        return self._client(STREAM, prompt, str(tokens))

    def until_ready(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while self._client(HEALTH).communicate(timeout=30)[0].strip() != "200":
            ended = {name: process.returncode for name, process in self._running.items() if process.poll() is not None}
            assert not ended, f"ended: {ended}\n" + "\n".join(self.log(name)[-2000:] for name in ended)
            assert time.monotonic() < until, "not ready:\n" + "\n".join(
                self.log(name)[-1000:] for name in self._running
            )
            time.sleep(0.5)


def text_of(stream: subprocess.Popen[str]) -> str:
    told, _ = stream.communicate(timeout=300)
    assert stream.returncode == 0, told
    said: Any = json.loads(told.splitlines()[-1])
    return str(said)
