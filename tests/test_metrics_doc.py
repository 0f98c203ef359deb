"""docs/metrics.md, the dashboard and the alerts name exactly, and only, metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from gateway.instances import Fleet
from gateway.metrics import Metrics
from pipeline.io.attempt_metrics import AttemptMetrics
from pipeline.io.instance_config import DaemonConfig
from pipeline.io.instance_metrics import COUNTERS, GAUGES
from pipeline.io.metrics_server import MetricsServer
from pipeline.io.supervisor import Phase
from pipeline.phases import FORWARD, GENERATE, PHASES, REPLY

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs/metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "deploy/dashboards/paceline.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy/dashboards/alerts.yaml").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
EXPRESSIONS += [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


def exposed() -> dict[str, Metric]:
    """Families by the name that Prometheus sees: a counter's ends in _total."""
    gateway, instance = Metrics(), CollectorRegistry()
    gateway.render(Fleet())
    AttemptMetrics(instance)
    config = DaemonConfig(instance="prefill-0", model="m", run_dir="r", role="prefill")
    loading: Any = SimpleNamespace(
        config=config,
        incarnation=None,
        phase=Phase.LOADING,
        stalled="",
        epoch=1,
        attempts=(),
        restarts=0,
        divergences=0,
    )
    MetricsServer(instance, loading)
    families = [*gateway.registry.collect(), *instance.collect()]
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}


def test_the_document_lists_exactly_the_metrics_there_are() -> None:
    listed = re.findall(r"^\| `(paceline_\w+)` \|", DOC, re.MULTILINE)
    assert sorted(listed) == sorted(exposed())


def test_the_document_explains_every_phase() -> None:
    told = {*PHASES.values(), FORWARD, GENERATE, REPLY, "queue"}
    explained = set(re.findall(r"^\| `(\w+)` \|", DOC, re.MULTILINE))
    assert told <= explained, told - explained


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_query_is_about_metrics_and_labels_that_exist(expression: str) -> None:
    metrics = exposed()
    named = re.findall(r"paceline_\w+", expression)
    assert named, "a query about nothing"
    for name in named:
        family = metrics.get(name) or metrics[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert (family.type == "histogram") == (name not in metrics), f"{name} is of a {family.type}"
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_names_follow_the_conventions() -> None:
    for name, family in exposed().items():
        assert re.fullmatch(r"paceline_(gateway|instance|rank)_[a-z_]+", name)
        assert family.documentation, name
        assert not re.search(r"(_ms|_us|_milliseconds|_kb|_mb)(_|$)", name), "base units only"
        assert family.type in ("gauge", "counter", "histogram")


def test_every_alert_says_what_is_wrong() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]


def test_no_counter_is_shown_twice() -> None:
    assert not COUNTERS.keys() & GAUGES.keys()
    names = [shown.name for shown in (*COUNTERS.values(), *GAUGES.values())]
    assert len(set(names)) == len(names)
