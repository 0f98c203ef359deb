"""The chart's network policies, as packet filters between pods that are network namespaces: who reaches whose ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.deploy import tools
from tests.deploy.variants import render
from tests.net.lab import Lab
from tests.net.pods import Pod, enforce, names, pods_of
from tests.net.switch import Path

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("_hosts")]

HTTP, REGISTRY, CONTROL, RING, RING_OF_LAST_RANK, TRANSFER, METRICS, SSH = 8000, 8001, 7001, 7800, 7807, 20000, 9100, 22
PORTS = (HTTP, REGISTRY, CONTROL, RING, RING_OF_LAST_RANK, TRANSFER, METRICS, SSH)
STRANGER, CLIENT, MONITOR = "stranger", "client", "monitor"

LISTEN = """
import select, socket, sys
sockets = [socket.create_server(("0.0.0.0", int(port))) for port in sys.argv[1:]]
print("ready", flush=True)
while True:
    for ours in select.select(sockets, [], [])[0]:
        ours.accept()[0].close()
"""
DIAL = """
import json, socket, sys
reached = []
for address, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((address, port), timeout=5).close()
        reached.append([address, port])
    except ConnectionRefusedError:
        pass
print(json.dumps(reached))
"""


class Cluster:
    def __init__(self, lab: Lab, pods: list[Pod]) -> None:
        self._lab, self._name = lab, {lab.addresses[pod.name]: pod.name for pod in pods}
        for pod in pods:
            listening = lab.start(pod.name, [sys.executable, "-c", LISTEN, *map(str, PORTS)], os.environ, sys.stderr)
            assert listening.stdout is not None and listening.stdout.readline() == "ready\n"

    def reached_by(self, source: str) -> dict[str, set[int]]:
        """By pod, its ports that `source` can connect to."""
        targets = [(address, port) for address, name in self._name.items() if name != source for port in PORTS]
        dialing = self._lab.start(source, [sys.executable, "-c", DIAL, json.dumps(targets)], os.environ, sys.stderr)
        told, _ = dialing.communicate(timeout=120)
        found: dict[str, set[int]] = {}
        for address, port in json.loads(told):
            found.setdefault(self._name[address], set()).add(port)
        return found


@pytest.fixture(scope="module")
def cluster(_hosts: None) -> Iterator[Cluster]:
    """Two prefill groups of two pods, one decode group of two, a gateway; and pods of others."""
    values = ("prefill.instances=2", "prefill.ranksPerPod=1", "decode.ranksPerPod=1", "gateway.replicas=1")
    objects = render(tools.ensure().helm, values)
    others = [Pod(STRANGER, {}, "elsewhere"), Pod(CLIENT, {}), Pod(MONITOR, {}, "monitoring")]
    pods = [*pods_of(objects), *others]
    with Lab([pod.name for pod in pods], Path()) as lab:
        for pod in pods:
            lab.name_all(pod.name, names(objects, pods, lab.addresses))
        enforce(lab, objects, pods)
        yield Cluster(lab, pods)


def pod(role: str, *place: int) -> str:
    return "-".join(["prod-paceline", role, *map(str, place)])


GATEWAY = pod("gateway", 0)
PREFILL = [pod("prefill", group, index) for group in (0, 1) for index in (0, 1)]
DECODE = [pod("decode", 0, index) for index in (0, 1)]


def test_a_gateway_reaches_the_control_ports_of_instances_and_nothing_else(cluster: Cluster) -> None:
    # Pods without a policy are open to all that their own side lets out: a gateway's side does not.
    assert cluster.reached_by(GATEWAY) == {name: {CONTROL} for name in (*PREFILL, *DECODE)}


def test_a_prefill_rank_reaches_its_group_the_other_side_and_the_registry(cluster: Cluster) -> None:
    mine, mate = PREFILL[:2]
    assert cluster.reached_by(mine) == {
        mate: {CONTROL, RING, RING_OF_LAST_RANK},
        **{name: {CONTROL, TRANSFER} for name in DECODE},
        GATEWAY: {REGISTRY},
    }


def test_a_decode_rank_reaches_the_same_of_its_own(cluster: Cluster) -> None:
    mine, mate = DECODE
    assert cluster.reached_by(mine) == {
        mate: {CONTROL, RING, RING_OF_LAST_RANK},
        **{name: {CONTROL, TRANSFER} for name in PREFILL},
        GATEWAY: {REGISTRY},
    }


def test_clients_reach_http_and_monitoring_what_it_reads(cluster: Cluster) -> None:
    open_to_all = {name: set(PORTS) for name in (STRANGER, CLIENT, MONITOR)}
    assert cluster.reached_by(CLIENT) == {GATEWAY: {HTTP}} | _without(open_to_all, CLIENT)
    assert cluster.reached_by(MONITOR) == (
        {GATEWAY: {HTTP}} | {name: {METRICS} for name in (*PREFILL, *DECODE)} | _without(open_to_all, MONITOR)
    )
    assert cluster.reached_by(STRANGER) == _without(open_to_all, STRANGER)


def test_names_are_those_that_pods_are_told(cluster: Cluster) -> None:
    """A member finds its leader by the name that `paceline-pod` makes of its own."""
    script = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    name = f"{PREFILL[2]}.prod-paceline-prefill.serving.svc"
    asking = cluster._lab.start(PREFILL[3], [sys.executable, "-c", script, name], os.environ, sys.stderr)
    told, _ = asking.communicate(timeout=30)
    assert told.strip() == cluster._lab.addresses[PREFILL[2]]


def _without(reached: dict[str, set[int]], name: str) -> dict[str, set[int]]:
    return {other: ports for other, ports in reached.items() if other != name}


def test_the_filters_are_what_closes_the_ports() -> None:
    """Without them, a stranger reaches everything: the tests above can fail."""
    with Lab(["one", "other"], Path()) as lab:
        cluster = Cluster(lab, [Pod("one", {}), Pod("other", {})])
        assert cluster.reached_by("one") == {"other": set(PORTS)}
        rule = [
            "ip",
            "netns",
            "exec",
            lab.namespace("other"),
            "iptables",
            "-A",
            "INPUT",
            "-p",
            "tcp",
            "--dport",
            str(RING),
        ]
        subprocess.run([*rule, "-j", "REJECT", "--reject-with", "tcp-reset"], check=True)
        assert cluster.reached_by("one") == {"other": set(PORTS) - {RING}}
