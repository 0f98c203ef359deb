"""Values that cannot work are refused before anything is installed, and the message says what is wrong and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.variants import CHART, refusal

BAD = {
    "an unknown value": (("prefill.rank=2",), "at '/prefill': additional properties 'rank' not allowed"),
    "no ranks": (("prefill.ranks=0",), "at '/prefill/ranks': minimum: got 0, want 1"),
    "too many ranks": (("decode.ranks=65",), "at '/decode/ranks': maximum: got 65, want 64"),
    "a word for a number": (("gateway.replicas=two",), "at '/gateway/replicas': got string, want integer"),
    "an unknown way to group": (("groups=deployment",), "at '/groups': value must be one of 'statefulset', 'lws'"),
    "a digest that is none": (
        ("image.digest=latest",),
        "at '/image/digest': 'latest' does not match pattern '^(sha256:",
    ),
    "memory in the wrong unit": (("decode.kvMemory=2Gi",), "at '/decode/kvMemory': '2Gi' does not match pattern"),
    "a privileged port": (("ports.http=80",), "at '/ports/http': minimum: got 80, want 1,024"),
    "a model that is no path": (("model.path=smollm2",), "at '/model/path': 'smollm2' does not match pattern '^/'"),
    "no memory limit": (("decode.resources.limits=null",), "at '/decode/resources': missing property 'limits'"),
    "a layer split that is none": (("prefill.layers=19;11",), "at '/prefill/layers': '19;11' does not match pattern"),
    "an endless drain": (("decode.drainSeconds=7200",), "at '/decode/drainSeconds': maximum: got 7,200, want 3,600"),
    "ranks that do not fill pods": (
        ("prefill.ranks=5", "prefill.ranksPerPod=2"),
        "prefill: ranks (5) is not a multiple of ranksPerPod (2); every pod of a group holds as many ranks",
    ),
    "single pods of a group scaled": (
        ("prefill.ranksPerPod=1", "prefill.autoscaling.mode=keda"),
        "a group of 2 pods is scaled as one by a LeaderWorkerSet only; set groups: lws, or all ranks in one pod (ranksPerPod: 2)",
    ),
    "scaling without a metric": (("decode.autoscaling.mode=hpa",), "decode.autoscaling.mode is hpa: metric must name"),
    "fewer at most than at least": (
        ("decode.autoscaling.mode=keda", "decode.autoscaling.min=5"),
        "decode.autoscaling: min (5) is more than max (4)",
    ),
    "certificates of nobody": (("security.mode=certManager",), "security.certManager.issuer names no issuer"),
    "an update that cannot begin": (
        ("groups=lws", "lws.maxUnavailable=0"),
        "lws: maxUnavailable and maxSurge are both 0, so an update could replace nothing",
    ),
    "a range the wrong way round": (
        ("ports.ranks.from=30000", "ports.ranks.to=20000"),
        "ports.ranks: from (30000) is more than to (20000)",
    ),
    "a port inside the ranks' range": (
        ("ports.grpc=16000",),
        "ports.grpc (16000) is inside ports.ranks (15000 to 32767)",
    ),
    "a port of the ring taken": (("ports.grpc=7803",), "ports.grpc (7803) is one of the ring's ports (7800 to 7807"),
    "a ring inside the ranks' range": (
        ("ports.ring=14999",),
        "ports.ring (14999 to 15006 for prefill) overlaps ports.ranks",
    ),
    "old and lws": (
        ("compat.oldApi=true", "groups=lws"),
        "compat.oldApi: the LeaderWorkerSet controller needs a newer",
    ),
}


@pytest.mark.parametrize(("values", "message"), BAD.values(), ids=BAD)
def test_bad_values_are_refused_with_a_reason(helm: Path, values: tuple[str, ...], message: str) -> None:
    assert message in refusal(helm, values)


def test_every_value_is_described_and_bounded() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    loose = []

    def look(at: str, node: dict[str, Any]) -> None:
        if at.endswith(("/env", "/requests/cpu", "/requests/memory", "/limits/memory")):
            return  # as in a pod
        if "$ref" not in node and "description" not in node:
            loose.append(f"{at}: no description")
        if node.get("type") in ("integer", "number") and "maximum" not in node:
            loose.append(f"{at}: no limit")
        if "properties" in node and "additionalProperties" not in node:
            loose.append(f"{at}: takes anything")
        for name, child in node.get("properties", {}).items():
            look(f"{at}/{name}", child)

    for name, child in (schema["properties"] | schema["$defs"]).items():
        look(f"/{name}", child)
    assert loose == []


def test_the_default_values_are_all_that_the_schema_knows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    unset = []

    def look(at: str, node: dict[str, Any], value: Any) -> None:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
        for name, child in node.get("properties", {}).items():
            if name not in value:
                unset.append(f"{at}/{name}")
            elif isinstance(value[name], dict):
                look(f"{at}/{name}", child, value[name])

    look("", schema, values)
    assert unset == ["/global"]
