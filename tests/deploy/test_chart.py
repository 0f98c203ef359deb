"""What the chart promises: a group of ranks is the unit, nothing is open that need not be, and ends are orderly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.instances import Fleet
from gateway.metrics import Metrics
from paceline.cli import build_parser
from tests.deploy.variants import EXTRAS, MATRIX, ROOT, identity, pod_templates, render

Objects = list[dict[str, Any]]
Rendered = dict[str, Objects]


def of(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = (t for t in objects if t["kind"] == kind and t["metadata"]["name"] == f"prod-paceline{name}")
    return found


def containers(objects: Objects) -> dict[str, dict[str, Any]]:
    found = {}
    for name, template in pod_templates(objects).items():
        (found[name],) = template["spec"]["containers"]
    return found


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


def test_a_group_of_several_pods_is_a_set_of_its_own(rendered: Rendered) -> None:
    objects = rendered["statefulset-tcp-tls-1"]
    for group in ("0", "1"):
        group_set = of(objects, "StatefulSet", f"-prefill-{group}")["spec"]
        assert (group_set["replicas"], group_set["podManagementPolicy"]) == (4, "Parallel")
        assert group_set["updateStrategy"] == {"type": "OnDelete"}
        assert group_set["selector"]["matchLabels"]["paceline/group"] == group
        assert group_set["template"]["metadata"]["labels"]["paceline/group"] == group
        assert environment(containers(objects)[f"prod-paceline-prefill-{group}"])["PACELINE_GROUP_SIZE"] == "4"


def test_groups_of_one_pod_are_the_pods_of_one_set(rendered: Rendered) -> None:
    spec = of(rendered["statefulset-tcp-tls-n"], "StatefulSet", "-prefill")["spec"]
    assert (spec["replicas"], spec["updateStrategy"]) == (2, {"type": "RollingUpdate"})


def test_a_leader_worker_set_has_a_replica_per_group(rendered: Rendered) -> None:
    spec = of(rendered["lws-tcp-tls-1"], "LeaderWorkerSet", "-prefill")["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (2, 4)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"


def test_members_find_their_leader_by_dns_before_it_is_ready(rendered: Rendered) -> None:
    objects = rendered["statefulset-tcp-tls-1"]
    service = of(objects, "Service", "-decode")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert of(objects, "StatefulSet", "-decode-0")["spec"]["serviceName"] == "prod-paceline-decode"
    variables = environment(containers(objects)["prod-paceline-decode-0"])
    assert variables["PACELINE_HEADLESS"] == "prod-paceline-decode.serving.svc"


def test_instances_register_with_all_gateways_by_one_name(rendered: Rendered) -> None:
    objects = rendered["defaults"]
    registry = of(objects, "Service", "-registry")["spec"]
    # A gateway is ready when instances have registered with it, so they must find it before.
    assert (registry["clusterIP"], registry["publishNotReadyAddresses"]) == ("None", True)
    for role in ("prefill", "decode"):
        assert (
            "--gateway=prod-paceline-registry.serving.svc:8001" in containers(objects)[f"prod-paceline-{role}"]["args"]
        )


@pytest.mark.parametrize("name", MATRIX)
def test_an_eviction_takes_one_group_at_a_time(rendered: Rendered, name: str) -> None:
    for role in ("prefill", "decode"):
        budget = of(rendered[name], "PodDisruptionBudget", f"-{role}")["spec"]
        # The first eviction makes the group unready: its other pods may follow, no other group's may.
        assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
        covered = [
            template for template in pod_templates(rendered[name]).values()
            if budget["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ]  # fmt: skip
        assert covered == [t for n, t in pod_templates(rendered[name]).items() if f"-{role}" in n]


def test_n_groups_at_a_time_are_the_pods_of_all_but_one_and_one_pod_more(helm: Path) -> None:
    objects = render(helm, ("groups=lws", "prefill.ranks=4", "prefill.ranksPerPod=1", "prefill.disruptedGroups=3"))
    assert of(objects, "PodDisruptionBudget", "-prefill")["spec"]["maxUnavailable"] == 2 * 4 + 1


def test_grace_outlasts_the_drain(helm: Path) -> None:
    objects = render(helm, ("decode.drainSeconds=300", "gateway.drainSeconds=45"))
    templates = pod_templates(objects)
    assert templates["prod-paceline-decode"]["spec"]["terminationGracePeriodSeconds"] == 320
    assert "--drain-timeout=300" in containers(objects)["prod-paceline-decode"]["args"]
    assert templates["prod-paceline-gateway"]["spec"]["terminationGracePeriodSeconds"] == 60
    gateway = containers(objects)["prod-paceline-gateway"]
    assert "--shutdown-grace=45" in gateway["args"] and gateway["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}


def test_probes_are_grpc_where_a_kubelet_can_ask(rendered: Rendered) -> None:
    container = containers(rendered["lws-tcp-plain-n"])["prod-paceline-prefill"]
    assert container["startupProbe"]["grpc"] == container["livenessProbe"]["grpc"] == {"port": 7001, "service": "live"}
    assert container["readinessProbe"]["grpc"] == {"port": 7001}


@pytest.mark.parametrize(
    "name", ["lws-tcp-tls-n", "statefulset-tcp-tls-n", "lws-tcp-plain-1", "statefulset-rdma-plain-1"]
)
def test_elsewhere_the_question_is_put_inside_the_container(rendered: Rendered, name: str) -> None:
    """With mutual TLS, and where the leader answers for the pods of its group."""
    for pod, container in containers(rendered[name]).items():
        if "gateway" not in pod:
            assert container["livenessProbe"]["exec"]["command"] == ["paceline-pod", "live"]
            assert container["readinessProbe"]["exec"]["command"] == ["paceline-pod", "ready"]


@pytest.mark.parametrize("name", MATRIX)
def test_G3_a_probe_that_is_late_once_restarts_nothing(rendered: Rendered, name: str) -> None:
    for container in containers(rendered[name]).values():
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["failureThreshold"] >= 3 and container[probe]["timeoutSeconds"] >= 5
        assert container["livenessProbe"]["failureThreshold"] * container["livenessProbe"]["periodSeconds"] >= 60


def test_probes_are_as_patient_as_the_values_say(helm: Path) -> None:
    patient = ("probes.readySeconds=10", "probes.liveSeconds=60", "probes.timeoutSeconds=30")
    for container in containers(render(helm, patient)).values():
        assert container["readinessProbe"]["periodSeconds"] == 10
        assert container["livenessProbe"]["periodSeconds"] == 60
        assert {container[f"{probe}Probe"]["timeoutSeconds"] for probe in ("startup", "readiness", "liveness")} == {30}


@pytest.mark.parametrize("name", MATRIX | EXTRAS)
def test_no_pod_has_rights_that_it_does_not_need(rendered: Rendered, name: str) -> None:
    for pod, template in pod_templates(rendered[name]).items():
        spec, (container,) = template["spec"], template["spec"]["containers"]
        security = container["securityContext"]
        rdma = "rdma" in name or "gpus" in name
        locks = ["IPC_LOCK"] if rdma and "gateway" not in pod else None
        assert security["capabilities"] == {"drop": ["ALL"]} | ({"add": locks} if locks else {})
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert (
            spec["securityContext"]["runAsNonRoot"]
            and spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        )
        assert spec["automountServiceAccountToken"] is False
        # Variables of services would be called PACELINE_…, as those that are read.
        assert spec["enableServiceLinks"] is False
        writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")} - {"/hugepages"}
        assert writable == ({"/tmp", "/run/paceline"} | ({"/dev/shm"} if "gateway" not in pod else set()))
    for thing in rendered[name]:
        assert thing["kind"] not in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
        if thing["kind"] == "ServiceAccount":
            assert thing["automountServiceAccountToken"] is False


def sources(policy: dict[str, Any], port: int) -> list[dict[str, Any]]:
    """Who may reach `port` by this policy."""
    found = []
    for rule in policy["spec"]["ingress"]:
        if any(p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"]):
            found += rule["from"]
    return found


def component(name: str, **more: str) -> dict[str, Any]:
    labels = {
        "app.kubernetes.io/name": "paceline",
        "app.kubernetes.io/instance": "prod",
        "app.kubernetes.io/component": name,
    }
    return {"podSelector": {"matchLabels": labels | more}}


def test_policies_name_who_may_reach_which_port(rendered: Rendered) -> None:
    objects = rendered["statefulset-rdma-tls-1"]
    prefill = of(objects, "NetworkPolicy", "-prefill")
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    control, transfer, mooncake, metrics, ring, last_of_ring = 7001, 20000, 15000, 9100, 7800, 7800 + 4 * 4 - 1
    assert sources(prefill, control) == [component("gateway"), component("decode")]
    assert sources(prefill, transfer) == sources(prefill, mooncake) == [component("decode")]
    assert sources(prefill, metrics) == [monitoring]
    assert sources(prefill, ring) == sources(prefill, 22) == []
    # Ring, store and group control: the pods of the same group and no other.
    group = of(objects, "NetworkPolicy", "-prefill-group-1")
    same = component("prefill", **{"paceline/group": "1"})
    assert group["spec"]["podSelector"] == same["podSelector"]
    assert sources(group, control) == sources(group, ring) == sources(group, last_of_ring) == [same]
    assert sources(group, last_of_ring + 1) == sources(group, transfer) == []
    gateway = of(objects, "NetworkPolicy", "-gateway")
    assert sources(gateway, 8001) == [component("prefill"), component("decode")]
    assert sources(gateway, 8000) == [{"podSelector": {}}, monitoring]


def test_a_collector_of_traces_can_be_let_through(helm: Path) -> None:
    rule = (
        "networkPolicy.egress[0].ports[0].port=4317,networkPolicy.egress[0].to[0].podSelector.matchLabels.app=collector"
    )
    wanted = {"ports": [{"port": 4317}], "to": [{"podSelector": {"matchLabels": {"app": "collector"}}}]}
    objects = render(helm, (rule,))
    for component_name in ("-gateway", "-prefill", "-decode"):
        assert wanted in of(objects, "NetworkPolicy", component_name)["spec"]["egress"]


@pytest.mark.parametrize("name", MATRIX)
def test_every_pod_is_closed_in_both_directions(rendered: Rendered, name: str) -> None:
    policies = [thing for thing in rendered[name] if thing["kind"] == "NetworkPolicy"]
    for policy in policies:
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert all(rule["from"] and rule["ports"] for rule in policy["spec"]["ingress"])
        assert all(rule["to"] and rule["ports"] for rule in policy["spec"]["egress"])
    for template in pod_templates(rendered[name]).values():
        labels = template["metadata"]["labels"].items()
        assert any(policy["spec"]["podSelector"]["matchLabels"].items() <= labels for policy in policies)


def test_ranks_take_their_ports_from_the_range_that_the_policies_name(rendered: Rendered) -> None:
    for name in MATRIX:
        for pod, template in pod_templates(rendered[name]).items():
            if "gateway" not in pod:
                (sysctl,) = template["spec"]["securityContext"]["sysctls"]
                assert sysctl == {"name": "net.ipv4.ip_local_port_range", "value": "15000 32767"}


def test_rdma_brings_devices_and_pages_and_its_absence_none(rendered: Rendered) -> None:
    limits = containers(rendered["lws-rdma-tls-n"])["prod-paceline-decode"]["resources"]["limits"]
    assert (limits["rdma/hca"], limits["hugepages-2Mi"]) == (1, "1Gi")
    assert "rdma" not in identity({"all": rendered["lws-tcp-tls-n"]})
    gpus = containers(rendered["gpus-on-the-host-network"])
    assert gpus["prod-paceline-decode"]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert gpus["prod-paceline-prefill-0"]["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_secrets_are_files_in_one_folder_of_the_names_that_are_read(rendered: Rendered) -> None:
    mounted = pod_templates(rendered["cert-manager"])["prod-paceline-gateway"]["spec"]["volumes"]
    (secrets,) = (volume for volume in mounted if volume["name"] == "secrets")
    paths = {item["path"] for source in secrets["projected"]["sources"] for item in source["secret"]["items"]}
    assert paths == {"ca.crt", "tls.crt", "tls.key", "curve.key", "shared.key"}
    certificate = of(rendered["cert-manager"], "Certificate", "")["spec"]
    assert certificate["dnsNames"] == ["cluster.paceline"]
    for name in MATRIX:
        for container in containers(rendered[name]).values():
            secured = "-tls-" in name
            assert (environment(container).get("PACELINE_SECRETS") == "/etc/paceline/secrets") == secured
            assert ("--insecure" in container["args"]) != secured


def test_whoever_scales_owns_the_number_of_groups(rendered: Rendered, helm: Path) -> None:
    objects = rendered["monitored-and-scaled"]
    assert "replicas" not in of(objects, "LeaderWorkerSet", "-decode")["spec"]
    scaled = of(objects, "ScaledObject", "-decode")["spec"]
    assert scaled["scaleTargetRef"]["kind"] == "LeaderWorkerSet"
    assert "paceline_gateway_inter_token_seconds_bucket" in scaled["triggers"][0]["metadata"]["query"]
    objects = rendered["scaled-by-hpa"]
    assert "replicas" not in of(objects, "StatefulSet", "-decode")["spec"]
    assert of(objects, "HorizontalPodAutoscaler", "-decode")["spec"]["scaleTargetRef"]["kind"] == "StatefulSet"


def test_the_dashboard_and_the_alerts_of_the_repository_are_the_charts(rendered: Rendered) -> None:
    """They are made elsewhere and seen through a link; a checkout without them has a chart without them."""
    dashboard, alerts = (ROOT / "deploy" / "dashboards" / name for name in ("paceline.json", "alerts.yaml"))
    objects = rendered["monitored-and-scaled"]
    maps = [thing["data"]["paceline.json"].split() for thing in objects if thing["kind"] == "ConfigMap"]
    link = "ln -s ../../dashboards deploy/helm/paceline/dashboards"
    assert maps == ([dashboard.read_text().split()] if dashboard.exists() else []), link
    *shared, _own = of(objects, "PrometheusRule", "")["spec"]["groups"]
    assert shared == (yaml.safe_load(alerts.read_text())["groups"] if alerts.exists() else []), link


@pytest.mark.parametrize("name", MATRIX | EXTRAS)
def test_the_command_takes_every_option_that_the_chart_sets(
    rendered: Rendered, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for container in containers(rendered[name]).values():
        _, unknown = build_parser().parse_known_args(container["args"])
        assert unknown == [], capsys.readouterr().err


def test_alerts_point_to_what_the_docs_say(rendered: Rendered) -> None:
    docs = (ROOT / "docs" / "kubernetes.md").read_text()
    (rules,) = (t for t in rendered["monitored-and-scaled"] if t["kind"] == "PrometheusRule")
    for rule in rules["spec"]["groups"][-1]["rules"]:
        place = rule["annotations"]["runbook"].split('"')[1]
        assert f"**{place}**" in docs or f"## {place}" in docs


def test_alerts_and_scaling_ask_for_metrics_that_there_are(rendered: Rendered) -> None:
    types = [line.split()[2:] for line in Metrics().render(Fleet()).decode().splitlines() if line.startswith("# TYPE")]
    known = {name + ("_bucket" if kind == "histogram" else "") for name, kind in types}
    objects = rendered["monitored-and-scaled"]
    own = of(objects, "PrometheusRule", "")["spec"]["groups"][-1]
    asked = set(
        re.findall(r"paceline_gateway_\w+", identity({"own": own, "scaled": of(objects, "ScaledObject", "-decode")}))
    )
    assert len(asked) >= 5 and asked <= known
