"""The chart, installed on a real cluster with secrets and keys as docs/kubernetes.md makes them, and a client on one of its nodes.

In: a cluster (`nodes.py`), values. Out: pods, what instances say of themselves, answers. Invariant: what is waited for in
vain fails with what pods, kubelets and containerd last said.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.deploy.nodes import Cluster
from tests.deploy.tools import Tools
from tests.deploy.variants import CHART, NAMESPACE, OVERLAYS, ROOT
from tests.net.deployment import STREAM, text_of

PATIENCE_S = 300.0
NAME = "prod"
PREFIX = f"{NAME}-paceline"
KEY = "a-key-of-this-test"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class Release:
    def __init__(self, cluster: Cluster, tools: Tools, secrets: Path) -> None:
        """`secrets`: an empty folder for those of the cluster."""
        self.cluster, self._tools = cluster, tools
        cluster.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        certs = [sys.executable, "-m", "paceline.cli", "certs", str(secrets)]
        subprocess.run(certs, cwd=ROOT, check=True, capture_output=True)
        self._make_secret("paceline-secrets", {file.name: file.read_bytes() for file in secrets.iterdir()})
        self._make_secret("paceline-api-keys", {"keys": f"{KEY}\n".encode()})

    def _make_secret(self, name: str, files: dict[str, bytes]) -> None:
        data = {file: base64.b64encode(content).decode() for file, content in files.items()}
        self.cluster.plane.call(
            "POST", f"/api/v1/namespaces/{NAMESPACE}/secrets", {"metadata": {"name": name}, "data": data}
        )

    # ---- commands

    def helm(self, verb: str, *options: str, values: tuple[str, ...]) -> None:
        sets = [option for value in values for option in ("--set", value)]
        overlay = ["--values", str(OVERLAYS / "compat.yaml")]
        command = [self._tools.helm, verb, NAME, CHART, "--namespace", NAMESPACE, *overlay, *options, *sets]
        self._run(*map(str, command))

    def kubectl(self, *words: str) -> str:
        return self._run(str(self._tools.kubectl), "--namespace", NAMESPACE, *words)

    def roll_groups(self) -> None:
        self._run(str(ROOT / "deploy/helm/roll-groups.sh"), NAME, NAMESPACE, str(int(PATIENCE_S)))

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S,
            env={"KUBECONFIG": str(self.cluster.plane.kubeconfig), "KUBECTL": str(self._tools.kubectl), "PATH": "/usr/bin:/bin",
                 "HOME": str(self._tools.folder)},
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}{self.story()}"
        return done.stdout

    # ---- pods

    def pods(self, component: str = "") -> dict[str, dict[str, Any]]:
        found = self.cluster.plane.items(f"{PODS}?labelSelector=app.kubernetes.io/instance%3D{NAME}")
        return {pod["metadata"]["name"]: pod for pod in found
                if component in ("", pod["metadata"]["labels"]["app.kubernetes.io/component"])}  # fmt: skip

    def until_ready(self, count: int) -> None:
        """So many pods, all of them ready."""

        def ready() -> bool:
            pods = self.pods().values()
            return len(pods) == count and all(is_ready(pod) for pod in pods)

        self.eventually(f"{count} pods ready", ready)

    def epoch(self, instance: str) -> int:
        """What its leader says."""
        leader = instance if instance in self.pods() else f"{instance}-0"
        told = json.loads(
            self.kubectl("exec", leader, "--", "paceline", "status", "--json", "--address", "127.0.0.1:7001")
        )
        return int(told["instances"][0]["epoch"])

    # ---- a client

    @property
    def url(self) -> str:
        """Of the service."""
        service = self.cluster.plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/services/{PREFIX}")
        return f"http://{service['spec']['clusterIP']}:8000"

    def stream(self, node: str, url: str, prompt: str, tokens: int) -> subprocess.Popen[str]:
        """`text_of` it is what was said."""
        network = f"--net=/run/netns/{self.cluster.nodes[node].namespace}"
        command = ["nsenter", network, sys.executable, "-c", STREAM, url, KEY, prompt, str(tokens)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @contextmanager
    def under_load(self, node: str, prompt: str, tokens: int, at_once: int = 2) -> Iterator[list[str]]:
        """So many streams all the time; when the block has ended, the list holds what each of them said."""
        said: list[str] = []
        ended, url = threading.Event(), self.url

        def ask() -> None:
            while not ended.is_set():
                try:
                    said.append(text_of(self.stream(node, url, prompt, tokens)))
                except (AssertionError, ValueError, subprocess.TimeoutExpired) as failure:
                    said.append(f"failed: {failure}")

        askers = [threading.Thread(target=ask) for _ in range(at_once)]
        for asker in askers:
            asker.start()
        try:
            yield said
        finally:
            ended.set()
            for asker in askers:
                asker.join(PATIENCE_S)

    # ---- waiting

    def eventually(self, what: str, probe: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        until = time.monotonic() + seconds
        while not probe():
            assert time.monotonic() < until, f"not within {seconds:g} s: {what}{self.story()}"
            time.sleep(0.5)

    def story(self) -> str:
        """What pods and nodes last said."""
        told = ""
        for name, pod in self.pods().items():
            status = pod["status"]
            containers = [(c["restartCount"], c["state"]) for c in status.get("containerStatuses", ())]
            told += f"\n---- pod {name} on {pod['spec'].get('nodeName')}: {status.get('phase')} {containers}\n"
            command = [
                str(self._tools.kubectl),
                f"--kubeconfig={self.cluster.plane.kubeconfig}",
                "-n",
                NAMESPACE,
                "logs",
                name,
            ]
            log = subprocess.run(
                [*command, "--tail=12", "--request-timeout=5s"], capture_output=True, text=True, check=False
            )
            told += log.stdout + log.stderr
        events = self.cluster.plane.items(f"/api/v1/namespaces/{NAMESPACE}/events")
        latest = sorted(events, key=lambda event: event.get("lastTimestamp") or "")[-15:]
        told += "\n---- events\n" + "\n".join(f"{e['involvedObject']['name']}: {e['message']}" for e in latest)
        return told + "".join(node.logs() for node in self.cluster.nodes.values())


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and not pod["metadata"].get("deletionTimestamp")


def uids(pods: dict[str, dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods.values()}
