"""A real cluster on this machine: the API server of `control_plane.py`, two nodes (`node.py`), a network between them, and
names (`cluster_dns.py`).

In: binaries of `deploy/livetest/build-kubernetes.sh`, an image in buildah's store. Out: two ready nodes that have the image.
Invariants: one such cluster at a time; when the block ends, no process, mount, device, namespace, control group or file of it
is left; what a killed run left, the next one removes. Of this machine's own network it has one device.

    this host  .0.1 ──┐
    node n1    .0.11 ─┼─ a switch in a namespace of its own; pods of n1: .1.0/24, of n2: .2.0/24
    node n2    .0.12 ─┘
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

from tests.deploy.cluster_dns import cluster_dns
from tests.deploy.control_plane import ControlPlane, control_plane
from tests.deploy.node import Node
from tests.deploy.variants import ROOT

NET = "10.111"
HOST = f"{NET}.0.1"
SWITCH, DEVICE = "paceline-nodes-switch", "paceline-nodes"
NAMES = ("n1", "n2")
PACKAGES = {
    "containerd": "containerd", "runc": "runc", "iptables": "iptables", "ip": "iproute2", "buildah": "buildah",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}  # fmt: skip
CGROUPS = "k8s.io"  # where containerd puts those of a pod whose kubelet names no place
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Cluster:
    plane: ControlPlane
    nodes: dict[str, Node]

    def cut(self, name: str) -> None:
        _ip("-n", SWITCH, "link", "set", name, "down")

    def heal(self, name: str) -> None:
        _ip("-n", SWITCH, "link", "set", name, "up")

    def is_ready(self, name: str) -> bool:
        node: dict[str, Any] = self.plane.call("GET", f"/api/v1/nodes/{name}")
        return any((c["type"], c["status"]) == ("Ready", "True") for c in node["status"].get("conditions", ()))


@contextmanager
def two_nodes(binaries: Path, image: str) -> Iterator[Cluster]:
    """Root only."""
    _install()
    cache = Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline") / "kube"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(cache / "nodes.lock"))
        _remove(cache)
        stack.callback(_remove, cache)
        work = Path(tempfile.mkdtemp(prefix="nodes-", dir=cache))
        archives = [_save(image, work / "image.tar"), _save(_pause_image(), work / "pause.tar")]
        _build_network()
        (work / "plane").mkdir()
        plane = stack.enter_context(control_plane(binaries, work / "plane", HOST))
        stack.enter_context(cluster_dns(plane, HOST))
        nodes = {name: _node(name, number, work) for number, name in enumerate(NAMES, start=1)}
        for node in nodes.values():
            stack.callback(node.stop)
            node.start()
            node.start_containerd(_pause_image())
        with ThreadPoolExecutor() as at_once:
            list(at_once.map(lambda node: [node.load(archive) for archive in archives], nodes.values()))
        for node in nodes.values():
            node.start_kubelet(binaries, plane.kubeconfig, HOST)
        for archive in archives:
            archive.unlink()
        cluster = Cluster(plane, nodes)
        for node in nodes.values():
            node.until("the node is ready", lambda node=node: _registered(cluster, node.name))  # type: ignore[misc]
        yield cluster


def _registered(cluster: Cluster, name: str) -> bool:
    with contextlib.suppress(OSError):
        return cluster.is_ready(name)
    return False


def _node(name: str, number: int, work: Path) -> Node:
    return Node(name, _namespace(name), f"{NET}.0.{10 + number}", f"{NET}.{number}.0/24", work / name)


def _install() -> None:
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if missing:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        )


# ---- images


def _save(image: str, archive: Path) -> Path:
    # Of this kind layers are not compressed, which takes longer than all the rest.
    subprocess.run(
        ["buildah", "push", "--quiet", image, f"docker-archive:{archive}:{image}"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return archive


def _pause_image() -> str:
    """What holds a pod's namespaces: the base of the image, asleep."""
    packages = sha256((ROOT / "deploy/image/packages.txt").read_bytes()).hexdigest()[:12]
    base, pause = f"localhost/paceline-base:bookworm-{packages}", f"localhost/paceline-pause:{packages}"
    if subprocess.run(["buildah", "inspect", "--type", "image", pause], capture_output=True, check=False).returncode:
        container = _buildah("from", "--pull-never", base)
        _buildah("config", "--entrypoint", '["/bin/sleep", "infinity"]', container)
        _buildah("commit", "--quiet", "--rm", container, pause)
    return pause


def _buildah(*words: str) -> str:
    return subprocess.run(["buildah", *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


# ---- the network


def _build_network() -> None:
    _ip("netns", "add", SWITCH)
    _ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
    _ip("-n", SWITCH, "link", "set", "br0", "up")
    _ip("link", "add", DEVICE, "type", "veth", "peer", "name", "host", "netns", SWITCH)
    _ip("-n", SWITCH, "link", "set", "host", "master", "br0", "up")
    _ip("address", "add", f"{HOST}/24", "dev", DEVICE)
    _ip("link", "set", DEVICE, "up")
    for number, name in enumerate(NAMES, start=1):
        namespace, address = _namespace(name), f"{NET}.0.{10 + number}"
        _ip("netns", "add", namespace)
        _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", name, "netns", SWITCH)
        _ip("-n", SWITCH, "link", "set", name, "master", "br0", "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")
        # Without it an address of a service has no way out, on which it would be translated.
        _ip("-n", namespace, "route", "add", "default", "via", HOST)
        _ip("netns", "exec", namespace, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        _ip("route", "add", f"{NET}.{number}.0/24", "via", address, "dev", DEVICE)
    for number, name in enumerate(NAMES, start=1):
        for other in {1, 2} - {number}:
            _ip("-n", _namespace(name), "route", "add", f"{NET}.{other}.0/24", "via", f"{NET}.0.{10 + other}")


def _namespace(name: str) -> str:
    return f"paceline-nodes-{name}"


def _ip(*words: object) -> None:
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(map(str, words))}: {done.stderr}"


# ---- the end


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove(cache: Path) -> None:
    """Everything that a cluster of this kind has outside of its processes."""
    for namespace in (*map(_namespace, NAMES), SWITCH):
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
    subprocess.run(["ip", "link", "delete", DEVICE], capture_output=True, check=False)
    _remove_cgroups()
    for folder in cache.glob("nodes-*"):
        shutil.rmtree(folder)


def leftovers() -> list[str]:
    """What of a cluster of this kind can still be seen on this machine."""
    devices = [device for device in psutil.net_if_addrs() if device.startswith(DEVICE)]
    namespaces = [str(path) for path in Path("/run/netns").glob(f"{DEVICE}*")]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "/kube/nodes-" in line]
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{CGROUPS}")]
    commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    processes = [command for command in commands if "/kube/nodes-" in command]
    return devices + namespaces + mounts + groups + processes


def _remove_cgroups() -> None:
    until = time.monotonic() + PATIENCE_S
    for root in Path("/sys/fs/cgroup").glob(f"*/{CGROUPS}"):
        for folder, _, _ in os.walk(root, topdown=False):
            while True:  # a killed process leaves its group a moment later
                try:
                    os.rmdir(folder)
                    break
                except OSError:
                    assert time.monotonic() < until, f"{folder} is still in use"
                    time.sleep(0.1)
