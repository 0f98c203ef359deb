"""Every variant of the chart is what helm, Kubernetes, the controllers of its custom resources and a policy scanner take."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import KUBERNETES, Tools
from tests.deploy.variants import CHART, DIGEST, EXTRAS, MATRIX, ROOT, as_statefulset, command, identity

Rendered = dict[str, list[dict[str, Any]]]

HERE = Path(__file__).parent
OLDEST_SCHEMAS = "1.25"  # of the validator; what 1.20 had and 1.25 has not is in crds.json
SKIPPED = {
    "CKV_K8S_11": "no CPU limit: a throttled rank holds up its whole group",
    "CKV_K8S_15": "images are named by digest, so another pull brings nothing new",
    "CKV_K8S_35": "what reads a secret from a file is what we do; the check sees names of variables only",
}


def with_exceptions(thing: dict[str, Any]) -> dict[str, Any]:
    """Marked for the scanner where RDMA asks for what is refused to everything else, and only there."""
    pod = thing.get("spec", {}).get("template", {}).get("spec", {})
    devices = [c for c in pod.get("containers", ()) if "rdma/hca" in c["resources"]["limits"]]
    if not devices:
        return thing
    marks = {"checkov.io/skip1": "CKV_K8S_25=registered memory must be lockable"}
    assert [c["securityContext"]["capabilities"]["add"] for c in devices] == [["IPC_LOCK"]]
    if pod.get("hostNetwork"):
        marks["checkov.io/skip2"] = "CKV_K8S_19=asked for with rdma.hostNetwork"
    return thing | {"metadata": thing["metadata"] | {"annotations": marks}}


def check(toolbox: Tools, version: str, objects: list[dict[str, Any]]) -> list[str]:
    """The same object in many variants is checked once."""
    distinct = {identity(thing): thing for thing in objects}
    for thing in list(distinct.values()):
        if thing.get("kind") == "LeaderWorkerSet":
            pods = as_statefulset(thing)
            distinct[identity(pods)] = pods
    done = subprocess.run(
        [toolbox.validator("python"), HERE / "validate.py", version, HERE / "crds.json"],
        input=json.dumps(list(distinct.values())), capture_output=True, text=True, check=True,
    )  # fmt: skip
    complaints: list[str] = json.loads(done.stdout)
    return complaints


def test_helm_finds_nothing_to_say(helm: Path) -> None:
    for name, values in (MATRIX | EXTRAS).items():
        linted = subprocess.run(
            command(helm, ("lint", "--strict", str(CHART)), values), capture_output=True, text=True, check=False
        )
        assert linted.returncode == 0, (name, linted.stdout)


def test_every_variant_has_what_it_is_made_of(rendered: Rendered) -> None:
    for name in MATRIX:
        kinds = [thing["kind"] for thing in rendered[name]]
        groups, _, _, per_pod = name.split("-")
        wanted = {("lws", "1"): 2, ("lws", "n"): 2, ("statefulset", "1"): 4, ("statefulset", "n"): 2}[groups, per_pod]
        assert kinds.count("LeaderWorkerSet" if groups == "lws" else "StatefulSet") == wanted, name
        assert (kinds.count("Deployment"), kinds.count("PodDisruptionBudget"), kinds.count("ServiceAccount")) == (
            1,
            3,
            3,
        )


def test_every_variant_fits_the_newest_kubernetes(toolbox: Tools, rendered: Rendered) -> None:
    assert check(toolbox, KUBERNETES, [thing for objects in rendered.values() for thing in objects]) == []


def test_the_overlay_for_old_clusters_uses_nothing_newer(toolbox: Tools, rendered_old: Rendered) -> None:
    objects = [thing for variant in rendered_old.values() for thing in variant]
    assert check(toolbox, OLDEST_SCHEMAS, objects) == []
    text = identity({"all": objects})
    for newer in (
        '"grpc": {',
        "endPort",
        "unhealthyPodEvictionPolicy",
        '"sleep": {',
        '"policy/v1"',
        '"autoscaling/v2"',
    ):
        assert newer not in text


BREAKAGES: list[tuple[str, tuple[str, ...], object]] = [
    ("StatefulSet", ("spec", "podManagementPolicies"), "Parallel"),
    ("StatefulSet", ("spec", "template", "spec", "containers"), "none"),
    ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "hostNetwork"), "maybe"),
    ("LeaderWorkerSet", ("spec", "startupPolicy"), "LeaderFirst"),
    ("PodMonitor", ("spec", "podMetricsEndpoints"), [{"port": 9100}]),
    ("ScaledObject", ("spec", "triggers"), []),
    ("Certificate", ("spec", "issuerRef"), {}),
    ("PrometheusRule", ("spec", "groups"), [{"rules": []}]),
]


def test_the_validator_notices_what_is_wrong(toolbox: Tools, rendered: Rendered) -> None:
    broken = []
    for kind, path, value in BREAKAGES:
        thing = next(thing for objects in rendered.values() for thing in objects if thing["kind"] == kind)
        broken.append(json.loads(identity(thing)))
        place = broken[-1]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
    complaints = check(toolbox, KUBERNETES, broken)
    noticed = sorted(complaint.split()[0] for complaint in complaints)
    # The LeaderWorkerSet's bad pod is noticed in the StatefulSet that it becomes.
    assert noticed == sorted(
        [kind for kind, _, _ in BREAKAGES if kind != "LeaderWorkerSet"] + ["LeaderWorkerSet", "StatefulSet"]
    )


def test_the_policy_scanner_passes_all_variants_and_the_image(
    toolbox: Tools, rendered: Rendered, tmp_path: Path
) -> None:
    """Each distinct object once; a LeaderWorkerSet as the StatefulSet that its controller makes."""
    distinct = {}
    for objects in rendered.values():
        for thing in objects:
            thing = as_statefulset(thing) if thing["kind"] == "LeaderWorkerSet" else thing
            distinct[identity(thing)] = with_exceptions(thing)
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(distinct.values()))
    # It wants a tag where it cannot resolve one from an argument; the file pins its base by a dated tag.
    base = next(
        line for line in (ROOT / "deploy/image/Dockerfile").read_text().splitlines() if line.startswith("ARG BASE=")
    )
    dockerfile = (ROOT / "deploy/image/Dockerfile").read_text().replace("${BASE}", base.removeprefix("ARG BASE="))
    (tmp_path / "Dockerfile").write_text(dockerfile)
    done = subprocess.run(
        [toolbox.checkov, "--directory", tmp_path, "--framework", "kubernetes", "dockerfile", "--skip-download",
         "--skip-check", ",".join(SKIPPED), "--compact", "--quiet", "--output", "json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    reports = json.loads(done.stdout)
    assert {report["check_type"] for report in reports} == {"kubernetes", "dockerfile"}
    assert all(report["summary"]["passed"] > 40 for report in reports)
    failed = {
        f"{found['check_id']} {found['check_name']}: {found['resource']}"
        for report in reports
        for found in report["results"]["failed_checks"]
    }
    assert failed == set()


def test_images_are_named_by_digest_where_one_is_given(rendered: Rendered) -> None:
    for objects in rendered.values():
        for thing in objects:
            if thing["kind"] in ("Deployment", "StatefulSet"):
                (container,) = thing["spec"]["template"]["spec"]["containers"]
                assert container["image"].endswith(DIGEST.removeprefix("image.digest="))
