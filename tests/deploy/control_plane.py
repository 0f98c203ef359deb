"""A real API server on this machine, with the controllers and the scheduler; for nodes of its own, or with nodes that only
say that pods run.

In: the folder of `deploy/livetest/build-kubernetes.sh`, a folder to work in, for real nodes the address that they reach this
host at. Out: a kubeconfig of an administrator. Invariants: everything listens on that address or on loopback, on free ports,
and ends with the block.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKEN = "administrator-of-a-test"
NODES = 3
PATIENCE_S = 60.0
LOOPBACK = "127.0.0.1"
# Real kubelets renew their leases every ten seconds, and late where others take the cores.
SILENCE_S, EVICTION_S = 30, 5


@dataclass
class ControlPlane:
    url: str
    kubeconfig: Path
    certificate: Path
    unready: set[str] = field(default_factory=set)  # names of pods that are never reported ready
    held: threading.Event = field(default_factory=threading.Event)  # while set, no kubelet does anything

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The answer of the API. Raises `urllib.error.HTTPError`."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind},
            method=method,
        )
        with urllib.request.urlopen(
            request, timeout=10, context=ssl.create_default_context(cafile=str(self.certificate))
        ) as answer:
            return json.loads(answer.read())

    def items(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", path)["items"]
        return found


@contextmanager
def control_plane(binaries: Path, work: Path, address: str = LOOPBACK) -> Iterator[ControlPlane]:
    """`address`: for real nodes, which whoever starts them must let register; on loopback there are only pretended ones."""
    pretended = address == LOOPBACK
    etcd, peer, api = _free_ports(3)
    for name, command in (
        ("sa.key", ["openssl", "genrsa", "-out", str(work / "sa.key"), "2048"]),
        ("sa.pub", ["openssl", "rsa", "-in", str(work / "sa.key"), "-pubout", "-out", str(work / "sa.pub")]),
    ):
        subprocess.run(command, check=True, capture_output=True)
        assert (work / name).exists()
    (work / "tokens.csv").write_text(f"{TOKEN},administrator,1,system:masters\n")
    certificate = work / "serving" / "apiserver.crt"
    kubeconfig = work / "kubeconfig"
    kubeconfig.write_text(_kubeconfig(f"https://{address}:{api}", certificate))
    plane = ControlPlane(f"https://{address}:{api}", kubeconfig, certificate)
    with contextlib.ExitStack() as stack:

        def start(name: str, *options: str) -> None:
            log = stack.enter_context((work / f"{name}.log").open("wb"))
            process = subprocess.Popen([binaries / name, *options], stdout=log, stderr=log, cwd=work)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        start("etcd", "--data-dir", "etcd", "--unsafe-no-fsync", "--listen-client-urls", f"http://127.0.0.1:{etcd}",
              "--advertise-client-urls", f"http://127.0.0.1:{etcd}", "--listen-peer-urls", f"http://127.0.0.1:{peer}",
              "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}", "--initial-cluster", f"default=http://127.0.0.1:{peer}")  # fmt: skip
        # Nodes without a kubelet would be tainted and nobody would take that back.
        nodes = ["--disable-admission-plugins=TaintNodesByCondition"] if pretended else [
            f"--advertise-address={address}", "--kubelet-preferred-address-types=InternalIP",
            f"--default-not-ready-toleration-seconds={EVICTION_S}", f"--default-unreachable-toleration-seconds={EVICTION_S}",
        ]  # fmt: skip
        start("kube-apiserver", f"--etcd-servers=http://127.0.0.1:{etcd}", f"--bind-address={address}",
              f"--secure-port={api}", "--cert-dir=serving", "--service-cluster-ip-range=10.96.0.0/16",
              "--authorization-mode=RBAC", "--token-auth-file=tokens.csv", "--anonymous-auth=false",
              "--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=sa.pub",
              "--service-account-signing-key-file=sa.key", *nodes)  # fmt: skip
        _eventually("the API server", lambda: certificate.exists() and plane.items("/api/v1/namespaces"), work)
        start("kube-controller-manager", f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--port=0", "--secure-port=0",
              "--service-account-private-key-file=sa.key", f"--root-ca-file={certificate}",
              f"--node-monitor-grace-period={SILENCE_S}s", "--controllers=*,-nodelifecycle" if pretended else "--controllers=*")  # fmt: skip
        start("kube-scheduler", f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--port=0", "--secure-port=0")
        if pretended:
            stack.enter_context(_pretended_nodes(plane))
        _eventually("service accounts", lambda: plane.items("/api/v1/namespaces/default/serviceaccounts"), work)
        yield plane


@contextmanager
def _pretended_nodes(plane: ControlPlane) -> Iterator[None]:
    for number in range(NODES):
        _make_node(plane, f"node-{number}")
    ended = threading.Event()
    kubelets = threading.Thread(target=_be_all_kubelets, args=(plane, ended), daemon=True)
    kubelets.start()
    try:
        yield
    finally:
        ended.set()
        kubelets.join(10)


def _be_all_kubelets(plane: ControlPlane, ended: threading.Event) -> None:
    """Pods that have a node run; those of a group are ready when all of the group run, as the real ones' probes say."""
    while not ended.wait(0.2):
        if plane.held.is_set():
            continue
        with contextlib.suppress(OSError, ValueError):
            pods = [pod for pod in plane.items("/api/v1/pods") if pod["spec"].get("nodeName")]
            for number, pod in enumerate(pods):
                with contextlib.suppress(urllib.error.HTTPError):
                    _look_after(plane, pod, pods, number)


def _look_after(plane: ControlPlane, pod: dict[str, Any], pods: list[dict[str, Any]], number: int) -> None:
    meta = pod["metadata"]
    path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
    if meta.get("deletionTimestamp"):
        plane.call("DELETE", path, {"gracePeriodSeconds": 0})
        return
    group = [other for other in pods if _group(other) == _group(pod) and not other["metadata"].get("deletionTimestamp")]
    whole = len(group) >= int(_variable(pod, "PACELINE_GROUP_SIZE") or 1)
    ready = "True" if whole and meta["name"] not in plane.unready else "False"
    conditions = [
        {"type": kind, "status": "True" if kind in ("PodScheduled", "Initialized") else ready}
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    shown = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    if pod["status"].get("phase") == "Running" and shown.get("Ready") == ready:
        return
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    status = {
        "phase": "Running", "startTime": now, "podIP": f"10.9.{number // 250}.{number % 250 + 1}", "conditions": conditions,
        "containerStatuses": [
            {"name": c["name"], "image": c["image"], "imageID": c["image"], "ready": ready == "True", "started": True,
             "restartCount": 0, "state": {"running": {"startedAt": now}}}
            for c in pod["spec"]["containers"]
        ],
    }  # fmt: skip
    plane.call("PATCH", f"{path}/status", {"status": status}, "application/merge-patch+json")


def _group(pod: dict[str, Any]) -> tuple[str, str, str]:
    labels = pod["metadata"]["labels"]
    alone = labels.get("paceline/group") is None
    return (labels.get("app.kubernetes.io/instance", ""), labels.get("app.kubernetes.io/component", ""),
            pod["metadata"]["name"] if alone else labels["paceline/group"])  # fmt: skip


def _variable(pod: dict[str, Any], name: str) -> str:
    variables = {v["name"]: v.get("value", "") for v in pod["spec"]["containers"][0].get("env", ())}
    return variables.get(name, "")


def _make_node(plane: ControlPlane, name: str) -> None:
    capacity = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti"}
    plane.call("POST", "/api/v1/nodes", {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": [{"type": "Ready", "status": "True"}]},
    })  # fmt: skip


def _kubeconfig(url: str, certificate: Path) -> str:
    return json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url, "certificate-authority": str(certificate)}}],
        "users": [{"name": "test", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    })  # fmt: skip


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _eventually(what: str, probe: Callable[[], Any], work: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError, ValueError):
            if probe():
                return
        assert time.monotonic() < until, f"{what} did not come up within {PATIENCE_S:g} s; its logs are in {work}"
        time.sleep(0.2)
