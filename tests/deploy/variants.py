"""Every way to install the chart that is checked: groups × transport × TLS × ranks per pod, and what else can be switched on.

In: nothing. Out: names and values, and what helm makes of them. All are rendered as an operator would install them, with an
image by digest in a namespace of its own.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "paceline"
OVERLAYS = ROOT / "deploy" / "helm" / "overlays"
NAMESPACE = "serving"
DIGEST = f"image.digest=sha256:{'5' * 64}"

Values = tuple[str, ...]  # of --set; `@name` stands for an overlay

MATRIX: dict[str, Values] = {
    f"{groups}-{transport}-{'tls' if tls == 'secret' else 'plain'}-{per_pod}": (
        f"groups={groups}", f"security.mode={tls}", f"apiKeys.mode={tls}", f"@{transport}",
        "prefill.instances=2", "prefill.ranks=4", f"prefill.ranksPerPod={4 if per_pod == 'n' else 1}",
        "decode.instances=2", "decode.ranks=2", f"decode.ranksPerPod={2 if per_pod == 'n' else 1}",
    )
    for groups, transport, tls, per_pod in itertools.product(
        ("statefulset", "lws"), ("tcp", "rdma"), ("secret", "off"), ("1", "n")
    )
}  # fmt: skip

EXTRAS: dict[str, Values] = {
    "defaults": (),
    "several-ranks-in-several-pods": ("groups=lws", "prefill.ranks=6", "prefill.ranksPerPod=3"),
    "cert-manager": ("security.mode=certManager", "security.certManager.issuer=own-ca"),
    "monitored-and-scaled": (
        "metrics.serviceMonitor=true", "metrics.rules=true", "metrics.dashboard=true", "groups=lws",
        "prefill.ranksPerPod=1", "prefill.autoscaling.mode=keda", "decode.autoscaling.mode=keda",
    ),
    "scaled-by-hpa": ("decode.autoscaling.mode=hpa", "decode.autoscaling.metric=paceline_waiting"),
    "gpus-on-the-host-network": (
        "@rdma", "rdma.hostNetwork=true", "image.variant=cuda", "prefill.gpusPerRank=1", "decode.gpusPerRank=1",
        "prefill.runtimeClassName=nvidia", "model.claim=weights", "model.path=/models/big", "prefill.nearKey=rack",
        "prefill.ranksPerPod=1", "networkPolicy.enabled=false",
    ),
}  # fmt: skip

OLD: dict[str, Values] = {f"old-{name}": ("@compat", *values) for name, values in MATRIX.items() if "lws" not in name}


def command(helm: Path, verb: Sequence[str], values: Values) -> list[str]:
    options = [str(helm), *verb, "--namespace", NAMESPACE]
    for value in (DIGEST, *values):
        overlay = value.startswith("@")
        options += ["--values", str(OVERLAYS / f"{value[1:]}.yaml")] if overlay else ["--set", value]
    return options


def render(helm: Path, values: Values) -> list[dict[str, Any]]:
    """The objects; each is of plain values."""
    done = subprocess.run(
        command(helm, ("template", "prod", str(CHART)), values), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, _Loader) if document]


def refusal(helm: Path, values: Values) -> str:
    """What helm says to values that must not be installed."""
    done = subprocess.run(
        command(helm, ("template", "prod", str(CHART)), values), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0, f"{values} were taken"
    return done.stderr


def pod_templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of everything that makes pods, by its name."""
    found = {}
    for thing in objects:
        if thing["kind"] == "LeaderWorkerSet":
            found[thing["metadata"]["name"]] = thing["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        elif "template" in thing.get("spec", {}):
            found[thing["metadata"]["name"]] = thing["spec"]["template"]
    return found


def as_statefulset(lws: dict[str, Any]) -> dict[str, Any]:
    """What the controller of a LeaderWorkerSet makes of it, for tools that do not know it."""
    template = lws["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": lws["metadata"],
        "spec": {"serviceName": "s", "selector": {"matchLabels": template["metadata"]["labels"]}, "template": template},
    }  # fmt: skip


def identity(thing: dict[str, Any]) -> str:
    return json.dumps(thing, sort_keys=True)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that is there twice, which YAML's readers let pass and an API server does not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is there twice: {sorted(keys)}, {node.start_mark}"
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]
