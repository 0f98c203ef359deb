"""A rendered chart, running: every pod is a network namespace in which its container's command runs as a kubelet starts it.

In: values of the chart, the content of its Secrets and the path between hosts. Out: pods that can be asked, ended and
started again, also at another address. Invariant: what is told to a process is what the chart tells it; only where its
volumes are mounted is replaced by where they lie.
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
from collections.abc import Mapping, Sequence
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
url, key, prompt, tokens = *sys.argv[1:4], int(sys.argv[4])
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "ignore_eos": True}
request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
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


METRICS = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1] + "/metrics", timeout=30).read().decode())
"""
Secret = Mapping[str, bytes]  # by file


class Deployment:
    def __init__(
        self, values: tuple[str, ...], path: Path, secrets: Mapping[str, Secret] | None = None, key: str = ""
    ) -> None:
        """`key`: the API key that clients show."""
        self.objects = render(tools.ensure().helm, (*values, f"model.path={cache_folder() / DEFAULT_MODEL_NAME}"))
        self.pods = {pod.name: pod for pod in [*pods_of(self.objects), Pod(CLIENT, {})]}
        self._folder, self._key = FilePath(tempfile.mkdtemp(prefix="pn")), key  # short: sockets lie below it
        for name, files in (secrets or {}).items():
            lay_out(self._folder / name, files)
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._logs: dict[str, IO[str]] = {}
        command = self._folder / "paceline"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline.cli "$@"\n')
        command.chmod(0o755)
        self.lab = Lab(list(self.pods), path)
        for name, pod in self.pods.items():
            if pod.spec:
                self.lab.tune(name, pod.sysctls)
        self._publish()

    def __enter__(self) -> Deployment:
        for name, pod in self.pods.items():
            if pod.spec:
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
        changed = dict(replace)
        arguments = [changed.get(argument, argument) for argument in self.pods[name].container["args"]]
        log = self._logs.setdefault(name, (self._folder / f"{name}.log").open("a+"))
        self._running[name] = self._run(name, ["paceline-pod", *arguments], log)

    def end(self, *names: str, number: signal.Signals = signal.SIGTERM) -> list[int]:
        """All at once, as a controller does; returns how they exited, which takes no longer than the chart allows."""
        processes = {name: self._running.pop(name) for name in names}
        for process in processes.values():
            process.send_signal(number)
        graces = {name: self.pods[name].spec["terminationGracePeriodSeconds"] for name in names}
        return [process.wait(graces[name]) for name, process in processes.items()]

    def replace(self, name: str, address: str) -> None:
        """Another pod of the same name: another address, and nothing on its disk."""
        shutil.rmtree(self._run_dir(name), ignore_errors=True)
        self.lab.readdress(name, address)
        self._publish()
        self.start(name)

    def group(self, name: str) -> list[str]:
        return [other for other in self.pods if other.rpartition("-")[0] == name]

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def is_ready(self, name: str) -> bool:
        """What the pod's own probe says."""
        command = self.pods[name].container["readinessProbe"]["exec"]["command"]
        probe = self._run(name, command, self._logs[name])
        probe.communicate(timeout=30)
        return probe.returncode == 0

    def _run(self, name: str, command: Sequence[str], log: IO[str]) -> subprocess.Popen[str]:
        """In the pod's container."""
        variables = {
            "PATH": f"{self._folder}:{ROOT / 'deploy/image'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", **environment(self.pods[name], self.lab.addresses[name]),
        }  # fmt: skip
        variables = {key: self._here(name, value) for key, value in variables.items()}
        words = [self._here(name, word) for word in command]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]  # becomes the command, too
        return self.lab.start(name, [*named, *words], variables, log)

    def _run_dir(self, name: str) -> FilePath:
        return self._folder / str(list(self.pods).index(name))

    def _here(self, name: str, text: str) -> str:
        """The text with the places of the pod's volumes in it."""
        for mounted, volume in self.pods[name].mounts.items():
            if "secret" in volume:
                text = text.replace(mounted, str(self._folder / volume["secret"]["secretName"]))
            elif volume["name"] == "run":
                text = text.replace(mounted, str(self._run_dir(name)))
        return text

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
        return self._client(STREAM, self._key, prompt, str(tokens))

    def metric(self, name: str) -> float:
        """Of the gateway."""
        told, _ = self._client(METRICS).communicate(timeout=30)
        return sum(float(line.split()[-1]) for line in told.splitlines() if line.startswith((f"{name} ", f"{name}{{")))

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


def lay_out(folder: FilePath, files: Secret) -> None:
    """As a kubelet does: every file is a link into a folder that a link names, read-only for user and group."""
    (folder / "..1").mkdir(parents=True)
    (folder / "..data").symlink_to("..1")
    for name, content in files.items():
        (folder / "..1" / name).write_bytes(content)
        (folder / "..1" / name).chmod(0o440)
        (folder / name).symlink_to(f"..data/{name}")
