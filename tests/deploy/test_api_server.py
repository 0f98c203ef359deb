"""The chart on a real API server with real controllers (marker `kube`). Pods only say that they run: what is tested is what
Kubernetes makes of the objects. The server is of 2020, so the overlay for old clusters is used.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.control_plane import ControlPlane, control_plane
from tests.deploy.tools import Tools
from tests.deploy.variants import CHART, OVERLAYS, ROOT

pytestmark = [pytest.mark.kube, pytest.mark.timeout(3600)]

NAMESPACE = "serving"
TWO_GROUPS_OF_TWO = ("prefill.instances=2", "prefill.ranksPerPod=1", "decode.instances=2", "decode.ranksPerPod=1")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    built = subprocess.run(
        [ROOT / "deploy/livetest/build-kubernetes.sh"], stdout=subprocess.PIPE, text=True, check=True
    )
    with control_plane(Path(built.stdout.strip()), tmp_path_factory.mktemp("kube")) as plane:
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        yield plane


@pytest.fixture
def helm(plane: ControlPlane, toolbox: Tools) -> Iterator[Callable[..., str]]:
    """`helm` in the namespace; what was installed is gone after the test."""

    def run(*arguments: str, values: tuple[str, ...] = ()) -> str:
        options = [option for value in values for option in ("--set", value)]
        done = subprocess.run(
            [toolbox.helm, *arguments, "--namespace", NAMESPACE, "--kubeconfig", plane.kubeconfig, *options],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    run("uninstall", "prod", "--wait", "--ignore-not-found")


def install(helm: Callable[..., str], *values: str, verb: str = "install", wait: bool = True) -> None:
    extra = ["--wait", "--timeout", "120s"] if wait else []
    helm(verb, "prod", str(CHART), "--values", str(OVERLAYS / "compat.yaml"), *extra, values=values)


def pods(plane: ControlPlane, component: str) -> dict[str, dict[str, Any]]:
    found = plane.items(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app.kubernetes.io/component%3D{component}")
    return {pod["metadata"]["name"]: pod for pod in found}


def is_ready(pod: dict[str, Any]) -> bool:
    return any((c["type"], c["status"]) == ("Ready", "True") for c in pod["status"].get("conditions", ()))


def eventually(what: str, probe: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not probe():
        assert time.monotonic() < until, f"not within 60 s: {what}"
        time.sleep(0.2)


def test_it_installs_and_every_object_reads_back(plane: ControlPlane, helm: Callable[..., str]) -> None:
    install(helm, *TWO_GROUPS_OF_TWO)
    names = {f"prod-paceline-prefill-{group}-{index}" for group in (0, 1) for index in (0, 1)}
    assert set(pods(plane, "prefill")) == names
    # helm waits for enough of them, not for the last one.
    eventually(
        "every pod ready",
        lambda: all(is_ready(pod) for role in ("prefill", "decode", "gateway") for pod in pods(plane, role).values()),
    )
    assert len({pod["spec"]["nodeName"] for pod in pods(plane, "prefill").values()}) > 1
    endpoints = plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/endpoints/prod-paceline-prefill")
    assert {a["hostname"] for subset in endpoints["subsets"] for a in subset["addresses"]} == names
    policies = plane.items(f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies")
    assert len(policies) == 3 + 2 + 2
    for pod in pods(plane, "decode").values():
        assert not [
            m for c in pod["spec"]["containers"] for m in c["volumeMounts"] if "serviceaccount" in m["mountPath"]
        ]


def test_names_are_published_before_their_pods_are_ready(plane: ControlPlane, helm: Callable[..., str]) -> None:
    plane.unready |= {f"prod-paceline-decode-0-{index}" for index in (0, 1)}
    try:
        install(helm, "decode.ranksPerPod=1", wait=False)

        def published() -> bool:
            told = plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/endpoints/prod-paceline-decode")
            addresses = [a for subset in told.get("subsets", ()) for a in subset.get("addresses", ())]
            return {a.get("hostname") for a in addresses} == {"prod-paceline-decode-0-0", "prod-paceline-decode-0-1"}

        eventually("both pods of the group in DNS", published)
        assert not any(is_ready(pod) for pod in pods(plane, "decode").values())
    finally:
        plane.unready.clear()


def test_an_eviction_takes_no_second_group(plane: ControlPlane, helm: Callable[..., str]) -> None:
    install(helm, *TWO_GROUPS_OF_TWO)

    def evict(pod: str) -> int:
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        try:
            plane.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction", body)
        except urllib.error.HTTPError as error:
            return error.code
        return 201

    def allowed() -> int:
        budgets = f"/apis/policy/v1beta1/namespaces/{NAMESPACE}/poddisruptionbudgets"
        told: int = plane.call("GET", f"{budgets}/prod-paceline-prefill")["status"]["disruptionsAllowed"]
        return told

    eventually("a disruption is allowed", lambda: allowed() == 1)
    plane.held.set()  # the group does not come back while we look
    try:
        assert evict("prod-paceline-prefill-0-0") == 201
        assert evict("prod-paceline-prefill-1-0") == 429
        assert evict("prod-paceline-prefill-1-1") == 429
    finally:
        plane.held.clear()


def test_an_upgrade_replaces_whole_groups_one_by_one(
    plane: ControlPlane, helm: Callable[..., str], toolbox: Tools
) -> None:
    install(helm, *TWO_GROUPS_OF_TWO)

    def complete() -> bool:
        found = pods(plane, "prefill")
        return len(found) == 4 and all(
            is_ready(pod) and not pod["metadata"].get("deletionTimestamp") for pod in found.values()
        )

    eventually("every pod of the side ready", complete)
    before = {name: pod["metadata"]["uid"] for name, pod in pods(plane, "prefill").items()}
    install(helm, *TWO_GROUPS_OF_TWO, "prefill.drainSeconds=7", verb="upgrade", wait=False)
    down_at_once, ended = [], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            ready = [name for name, pod in pods(plane, "prefill").items() if is_ready(pod)]
            down_at_once.append(2 - len({name.rsplit("-", 1)[0] for name in ready}))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        subprocess.run(
            [ROOT / "deploy/helm/roll-groups.sh", "prod", NAMESPACE, "60"], check=True,
            env=os.environ | {"KUBECONFIG": str(plane.kubeconfig), "KUBECTL": str(toolbox.kubectl)},
        )  # fmt: skip
    finally:
        ended.set()
        watcher.join()
    after = pods(plane, "prefill")
    assert all(pod["metadata"]["uid"] != before[name] for name, pod in after.items())
    assert all("--drain-timeout=7" in pod["spec"]["containers"][0]["args"] for pod in after.values())
    assert max(down_at_once) == 1


def test_it_leaves_nothing_behind(plane: ControlPlane, helm: Callable[..., str]) -> None:
    install(helm)
    helm("uninstall", "prod", "--wait")
    for kind in (
        "/apis/apps/v1/{}/statefulsets",
        "/api/v1/{}/services",
        "/apis/policy/v1beta1/{}/poddisruptionbudgets",
    ):
        assert plane.items(kind.format(f"namespaces/{NAMESPACE}")) == []
