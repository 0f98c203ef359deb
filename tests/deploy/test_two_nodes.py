"""The real image as real pods on two nodes (marker `kube`): it answers, and goes on answering when a pod is deleted, when all of
it is replaced, and when a node is cut off. Decode groups have a rank on each node. The tests follow one another.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from engine.smollm2 import ensure_default_model
from tests.deploy.nodes import leftovers, two_nodes
from tests.deploy.release import PODS, PREFIX, Release, is_ready, uids
from tests.deploy.test_image import image
from tests.deploy.tools import Tools
from tests.deploy.variants import ROOT
from tests.engine.tiny_models import greedy
from tests.net.deployment import text_of

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1800)]

PROMPT, TOKENS = "The capital of France is", 48
SIDES = tuple(
    f"{side}.{value}"
    for side in ("prefill", "decode")
    for value in (
        "kvMemory=64M", "hostMemory=64M", "drainSeconds=5", "shmSize=128Mi", "resources.requests.cpu=50m",
        "resources.requests.memory=512Mi", "resources.limits.memory=2Gi",
    )
)  # fmt: skip
VALUES = (
    "image.repository=localhost/paceline-smollm2", "engine.transferBackend=stream", *SIDES,
    # Ten pods on a few cores that others use as well.
    "probes.readySeconds=10", "probes.liveSeconds=60", "probes.timeoutSeconds=30",
    "gateway.args[0]=--pair-wait=120", "gateway.args[1]=--resume-wait=300", "gateway.drainSeconds=30",
    "gateway.resources.requests.cpu=50m", "gateway.resources.requests.memory=256Mi",
    "prefill.instances=2", "prefill.ranks=1", "prefill.ranksPerPod=1", "decode.ranks=2", "decode.ranksPerPod=1",
)  # fmt: skip
ONE_GROUP, TWO_GROUPS = ("decode.instances=1",), ("decode.instances=2",)
GATEWAYS, PREFILLS = 2, 2


@pytest.fixture(scope="module")
def expected() -> str:
    """What transformers says."""
    folder = ensure_default_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = greedy(model, tokenizer(PROMPT)["input_ids"], TOKENS)
    return str(tokenizer.decode(said, skip_special_tokens=True))


@pytest.fixture(scope="module")
def release(toolbox: Tools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    built = subprocess.run(
        [ROOT / "deploy/livetest/build-kubernetes.sh"], stdout=subprocess.PIPE, text=True, check=True
    )
    with two_nodes(Path(built.stdout.strip()), image()) as cluster:
        release = Release(cluster, toolbox, tmp_path_factory.mktemp("secrets") / "made")
        release.helm("install", "--wait", "--timeout", "300s", values=(*VALUES, *ONE_GROUP))
        # One after the other, so that each of them is spread over both nodes.
        release.helm("upgrade", values=(*VALUES, *TWO_GROUPS))
        release.until_ready(GATEWAYS + PREFILLS + 4)
        yield release
    assert leftovers() == []


def ask(release: Release) -> str:
    return text_of(release.stream("n1", release.url, PROMPT, TOKENS))


def test_it_answers_with_ranks_of_a_group_on_both_nodes(release: Release, expected: str) -> None:
    for side, count in (("gateway", 2), ("prefill", 2), ("decode", 4)):
        pods = release.pods(side)
        assert len(pods) == count
        assert {pod["spec"]["nodeName"] for pod in pods.values()} == {"n1", "n2"}, side
    for group in (0, 1):
        members = {
            name: pod for name, pod in release.pods("decode").items() if name.startswith(f"{PREFIX}-decode-{group}")
        }
        assert {pod["spec"]["nodeName"] for pod in members.values()} == {"n1", "n2"}
    assert "Paris" in expected
    assert ask(release) == expected


def test_a_deleted_rank_pod_comes_back_under_a_new_epoch_and_no_stream_ends(release: Release, expected: str) -> None:
    group, pod = f"{PREFIX}-decode-1", f"{PREFIX}-decode-1-1"
    before, epoch, others = (
        release.pods()[pod]["metadata"]["uid"],
        release.epoch(group),
        release.epoch(f"{PREFIX}-decode-0"),
    )
    with release.under_load("n1", PROMPT, TOKENS) as said:
        release.kubectl("delete", "pod", pod)
        release.eventually("another pod, ready", lambda: (
            (new := release.pods().get(pod)) is not None and new["metadata"]["uid"] != before and is_ready(new)
        ))  # fmt: skip
        release.until_ready(GATEWAYS + PREFILLS + 4)
    assert len(said) > 2 and set(said) == {expected}
    assert release.epoch(group) > epoch
    assert release.epoch(f"{PREFIX}-decode-0") == others


def test_G6_an_update_replaces_every_pod_and_no_request_fails(release: Release, expected: str) -> None:
    before = uids(release.pods())
    with release.under_load("n1", PROMPT, TOKENS) as said:
        release.helm("upgrade", values=(
            *VALUES, *TWO_GROUPS, "prefill.drainSeconds=6", "decode.drainSeconds=6", "gateway.podAnnotations.update=second",
        ))  # fmt: skip
        release.eventually("gateways and prefill instances replaced", lambda: not before & (
            uids(release.pods("gateway")) | uids(release.pods("prefill"))
        ))  # fmt: skip
        release.until_ready(GATEWAYS + PREFILLS + 4)
        release.roll_groups()
        release.until_ready(GATEWAYS + PREFILLS + 4)
    assert not before & uids(release.pods())
    assert len(said) > 2 and set(said) == {expected}


def test_a_node_that_is_cut_off_is_given_up_and_the_other_answers(release: Release, expected: str) -> None:
    """Kubernetes never replaces a StatefulSet's pod of a silent node by itself: somebody must say that it is gone."""
    gateway = next(pod for pod in release.pods("gateway").values() if pod["spec"]["nodeName"] == "n1")
    url = f"http://{gateway['status']['podIP']}:8000"
    epochs = {group: release.epoch(f"{PREFIX}-decode-{group}") for group in (0, 1)}
    open_stream = release.stream("n1", url, PROMPT, TOKENS)
    assert open_stream.stdout is not None and open_stream.stdout.readline()
    release.cluster.cut("n2")
    release.eventually("n2 is given up", lambda: not release.cluster.is_ready("n2"))
    lost = {name for name, pod in release.pods().items() if pod["spec"]["nodeName"] == "n2"}
    for name in lost:
        release.cluster.plane.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
    release.until_ready(GATEWAYS + PREFILLS + 4)
    assert {pod["spec"]["nodeName"] for pod in release.pods().values()} == {"n1"}
    assert text_of(open_stream) == expected
    assert ask(release) == expected
    assert all(release.epoch(f"{PREFIX}-decode-{group}") > epoch for group, epoch in epochs.items())


def test_what_ran_on_the_cut_node_ends_when_it_is_back_and_disturbs_nobody(release: Release, expected: str) -> None:
    epochs = [release.epoch(f"{PREFIX}-decode-{group}") for group in (0, 1)]
    with release.under_load("n1", PROMPT, TOKENS) as said:
        release.cluster.heal("n2")
        release.eventually("n2 is back", lambda: release.cluster.is_ready("n2"))
        tasks = ("ctr", "--namespace", "k8s.io", "tasks", "list", "--quiet")
        release.eventually("its old pods have ended", lambda: not release.cluster.nodes["n2"].run(*tasks).split())
    assert set(said) == {expected}
    assert [release.epoch(f"{PREFIX}-decode-{group}") for group in (0, 1)] == epochs
    release.kubectl("delete", "pod", f"{PREFIX}-prefill-1")
    release.until_ready(GATEWAYS + PREFILLS + 4)
    assert release.pods()[f"{PREFIX}-prefill-1"]["spec"]["nodeName"] == "n2"
    assert ask(release) == expected
