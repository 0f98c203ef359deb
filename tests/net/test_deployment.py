"""The chart's deployment of two prefill and two decode ranks, a pod each, on hosts of their own with the policies between them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath

import pytest

from tests.deploy.variants import ROOT
from tests.net.deployment import Deployment, Secret, text_of
from tests.net.switch import Path

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("_hosts"), pytest.mark.timeout(300)]

VALUES = (
    "gateway.replicas=1", "gateway.args[0]=--pair-wait=120", "engine.transferBackend=stream",
    "prefill.ranksPerPod=1", "decode.ranksPerPod=1", "prefill.kvMemory=32M", "decode.kvMemory=32M", "decode.hostMemory=32M",
    "prefill.drainSeconds=5", "decode.drainSeconds=5",
)  # fmt: skip
OPEN = ("security.mode=off", "apiKeys.mode=off")
PROMPT, TOKENS = "The capital of France is", 48
PREFILL, DECODE = "prod-paceline-prefill-0", "prod-paceline-decode-0"
KEY = "a-key-of-this-test"


@dataclass(frozen=True)
class Case:
    round_trip: float
    secured: bool = False


CASES = {"1ms": Case(0.001), "20ms": Case(0.02), "secured": Case(0.001, secured=True)}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def deployment(
    _hosts: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    case: Case = request.param
    secrets = secrets_of(tmp_path_factory.mktemp("secrets")) if case.secured else {}
    values = VALUES if case.secured else VALUES + OPEN
    with Deployment(values, Path(delay=case.round_trip / 2), secrets, KEY) as deployment:
        deployment.until_ready()
        yield deployment


def secrets_of(folder: FilePath) -> dict[str, Secret]:
    """As docs/kubernetes.md makes them."""
    certs = [sys.executable, "-m", "paceline.cli", "certs", str(folder / "made")]
    subprocess.run(certs, cwd=ROOT, check=True, capture_output=True)
    return {
        "paceline-secrets": {file.name: file.read_bytes() for file in (folder / "made").iterdir()},
        "paceline-api-keys": {"keys": f"{KEY}\n".encode()},
    }


@pytest.fixture(scope="module")
def undisturbed(deployment: Deployment) -> str:
    return text_of(deployment.stream(PROMPT, TOKENS))


def begun(deployment: Deployment) -> subprocess.Popen[str]:
    """A stream of which the first token is there."""
    stream = deployment.stream(PROMPT, TOKENS)
    assert stream.stdout is not None and stream.stdout.readline()
    return stream


def test_it_answers(undisturbed: str) -> None:
    assert "Paris" in undisturbed


def test_every_pod_says_that_its_group_is_ready(deployment: Deployment) -> None:
    pods = [*deployment.group(PREFILL), *deployment.group(DECODE)]
    assert {pod: deployment.is_ready(pod) for pod in pods} == dict.fromkeys(pods, True)


def test_a_rank_that_is_killed_comes_back_at_another_address(deployment: Deployment, undisturbed: str) -> None:
    resumed = deployment.metric("paceline_gateway_resumed_requests_total")
    stream = begun(deployment)
    deployment.end(f"{DECODE}-1", number=signal.SIGKILL)
    deployment.replace(f"{DECODE}-1", "10.99.0.201")
    assert text_of(stream) == undisturbed
    assert deployment.metric("paceline_gateway_resumed_requests_total") == resumed + 1
    assert f"{DECODE}-1 at 10.99.0.201" in deployment.log(f"{DECODE}-0")
    deployment.until_ready()


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_G6_an_update_of_a_whole_group_loses_no_request(deployment: Deployment, undisturbed: str, name: str) -> None:
    group, before = deployment.group(name), begun(deployment)
    assert deployment.end(*group) == [0, 0]
    meanwhile = deployment.stream(PROMPT, TOKENS)
    for pod in group:
        deployment.start(pod, [("--drain-timeout=5", "--drain-timeout=6")])
    assert (text_of(before), text_of(meanwhile)) == (undisturbed, undisturbed)
    deployment.until_ready()


def test_sigterm_at_a_member_drains_its_group(deployment: Deployment, undisturbed: str) -> None:
    stream = begun(deployment)
    assert deployment.end(f"{DECODE}-1") == [0]
    assert "member 1 of 2 leaves: received SIGTERM" in deployment.log(f"{DECODE}-0")
    deployment.start(f"{DECODE}-1")
    assert text_of(stream) == undisturbed
    deployment.until_ready()
