"""The chart's deployment of two prefill and two decode ranks, a pod each, on hosts of their own with the policies between them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.net.deployment import Deployment, text_of
from tests.net.switch import Path

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("_hosts"), pytest.mark.timeout(900)]

VALUES = (
    "security.mode=off", "apiKeys.mode=off", "gateway.replicas=1", "engine.transferBackend=stream",
    "prefill.ranksPerPod=1", "decode.ranksPerPod=1", "prefill.kvMemory=32M", "decode.kvMemory=32M", "decode.hostMemory=32M",
    "prefill.drainSeconds=5", "decode.drainSeconds=5",
)  # fmt: skip
PROMPT = "The capital of France is"
PREFILL, DECODE = "prod-paceline-prefill-0", "prod-paceline-decode-0"


@pytest.fixture(scope="module", params=[0.001, 0.02], ids=["1ms", "20ms"])
def deployment(_hosts: None, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    with Deployment(VALUES, Path(delay=request.param / 2)) as deployment:
        deployment.until_ready()
        yield deployment


@pytest.fixture(scope="module")
def undisturbed(deployment: Deployment) -> str:
    return text_of(deployment.stream(PROMPT, 48))


def test_it_answers(undisturbed: str) -> None:
    assert "Paris" in undisturbed


def test_a_rank_that_is_killed_comes_back_at_another_address(deployment: Deployment, undisturbed: str) -> None:
    stream = deployment.stream(PROMPT, 48)
    assert stream.stdout is not None and stream.stdout.readline()
    deployment.end(f"{DECODE}-1", signal.SIGKILL)
    deployment.replace(f"{DECODE}-1", "10.99.0.201")
    assert text_of(stream) == undisturbed
    deployment.until_ready()


def test_an_update_of_whole_groups_loses_no_request(deployment: Deployment, undisturbed: str) -> None:
    for group in (PREFILL, DECODE):
        stream = deployment.stream(PROMPT, 48)
        assert stream.stdout is not None and stream.stdout.readline()
        for pod in deployment.group(group):
            deployment.end(pod)
        for pod in deployment.group(group):
            deployment.start(pod, [("--drain-timeout=5", "--drain-timeout=6")])
        assert text_of(stream) == undisturbed
        deployment.until_ready()


def test_sigterm_at_a_member_drains_its_group(deployment: Deployment, undisturbed: str) -> None:
    stream = deployment.stream(PROMPT, 48)
    assert stream.stdout is not None and stream.stdout.readline()
    assert deployment.end(f"{DECODE}-1") == 0
    deployment.start(f"{DECODE}-1")
    assert text_of(stream) == undisturbed
    deployment.until_ready()
