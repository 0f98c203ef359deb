"""Pods of a rendered chart as hosts of a lab: their names, their environment, and the policies between them as packet filters.

In: the chart's objects, and pods of others that stand in for monitoring and strangers. Out: for each pod what a kubelet would
start, what cluster DNS would answer, and filters in its network namespace that let through what the policies name.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.deploy.variants import NAMESPACE
from tests.net.lab import Lab

Labels = dict[str, str]
Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    name: str
    labels: Labels
    namespace: str = NAMESPACE
    service: str = ""  # the headless service that gives it a name of its own
    spec: Object = field(default_factory=dict)

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return container  # type: ignore[no-any-return]

    @property
    def mounts(self) -> dict[str, Object]:
        """What is mounted where."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        return {mount["mountPath"]: volumes[mount["name"]] for mount in self.container["volumeMounts"]}

    @property
    def sysctls(self) -> dict[str, str]:
        return {setting["name"]: setting["value"] for setting in self.spec["securityContext"].get("sysctls", [])}


def pods_of(objects: Iterable[Object]) -> list[Pod]:
    """As the controllers of StatefulSets and Deployments would make them."""
    found = []
    for thing in objects:
        if thing["kind"] not in ("StatefulSet", "Deployment"):
            continue
        spec = thing["spec"]
        for ordinal in range(spec["replicas"]):
            name = f"{thing['metadata']['name']}-{ordinal}"
            labels = spec["template"]["metadata"]["labels"]
            found.append(Pod(name, labels, service=spec.get("serviceName", ""), spec=spec["template"]["spec"]))
    return found


def environment(pod: Pod, address: str) -> dict[str, str]:
    """The container's variables, those of the downward API included."""
    downward = {"metadata.name": pod.name, "status.podIP": address}
    return {
        variable["name"]: variable["value"]
        if "value" in variable
        else downward[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        for variable in pod.container["env"]
    }


def names(objects: Iterable[Object], pods: Iterable[Pod], addresses: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, address) that cluster DNS answers with: of pods by their headless service, else of the service as a whole.

    Not both: gRPC's resolver takes names and addresses of a file of hosts that have one in common for one host.
    """
    answers = []
    for thing in objects:
        if thing["kind"] != "Service" or thing["spec"].get("clusterIP") != "None":
            continue
        service = f"{thing['metadata']['name']}.{NAMESPACE}.svc"
        for pod in pods:
            if pod.namespace == NAMESPACE and selects(thing["spec"]["selector"], pod.labels):
                own = pod.service == thing["metadata"]["name"]
                answers.append((f"{pod.name}.{service}" if own else service, addresses[pod.name]))
    return answers


def selects(selector: Mapping[str, str], labels: Labels) -> bool:
    return selector.items() <= labels.items()


def enforce(lab: Lab, objects: Iterable[Object], pods: list[Pod]) -> None:
    """What no policy names is answered with a reset, so that nobody waits; a pod that no policy selects is open."""
    policies = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
    for pod in pods:
        own = [policy for policy in policies if selects(policy["podSelector"]["matchLabels"], pod.labels)]
        if pod.namespace != NAMESPACE or not own:
            continue
        for chain, rules, peers, side in (("INPUT", "ingress", "from", "-s"), ("OUTPUT", "egress", "to", "-d")):
            _filter(lab, pod, "-F", chain)
            device = ("-i", "lo") if chain == "INPUT" else ("-o", "lo")
            _filter(lab, pod, "-A", chain, *device, "-j", "ACCEPT")
            _filter(lab, pod, "-A", chain, "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
            for rule in (rule for policy in own for rule in policy[rules]):
                for other in (other for other in pods if any(_is_peer(peer, other) for peer in rule[peers])):
                    for port in rule["ports"]:
                        _filter(lab, pod, "-A", chain, side, lab.addresses[other.name], *_port(port), "-j", "ACCEPT")
            _filter(lab, pod, "-A", chain, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
            _filter(lab, pod, "-A", chain, "-j", "DROP")


def _is_peer(peer: Object, pod: Pod) -> bool:
    namespace = peer.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}})
    in_namespace = selects(namespace["matchLabels"], {"kubernetes.io/metadata.name": pod.namespace})
    return in_namespace and selects(peer.get("podSelector", {}).get("matchLabels", {}), pod.labels)


def _port(port: Object) -> list[str]:
    last = port.get("endPort", port["port"])
    return ["-p", port["protocol"].lower(), "--dport", f"{port['port']}:{last}"]


def _filter(lab: Lab, pod: Pod, *words: str) -> None:
    command = ["ip", "netns", "exec", lab.namespace(pod.name), "iptables", "-w", *words]
    subprocess.run(command, check=True, capture_output=True, text=True)
