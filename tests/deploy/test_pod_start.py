"""`paceline-pod` tells an instance who it is from its pod's place alone; a command that is none of an instance's is left alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.variants import ROOT

SCRIPT = ROOT / "deploy" / "image" / "paceline-pod"
STATEFULSET = {"POD_IP": "10.1.0.7", "PACELINE_HEADLESS": "prod-paceline-prefill.serving.svc"}


@pytest.fixture
def start(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs the script with a `paceline` that says how it was called."""
    said = tmp_path / "paceline"
    said.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep ^PACELINE_ | sort\n')
    said.chmod(0o755)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables
        return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)

    return run


def told(done: subprocess.CompletedProcess[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments and the variables with which the instance starts."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    variables = [line for line in lines if line.startswith("PACELINE_")]
    return [line for line in lines if line not in variables], dict(line.split("=", 1) for line in variables)


def test_a_pod_of_a_group_knows_its_index_and_its_leader(start) -> None:  # type: ignore[no-untyped-def]
    done = start("prefill", "--pp=3", POD_NAME="prod-paceline-prefill-4-2", PACELINE_GROUP_SIZE="3", **STATEFULSET)
    arguments, variables = told(done)
    assert arguments[:5] == ["prefill", "--instance", "prod-paceline-prefill-4", "--advertise", "10.1.0.7"]
    assert arguments[-1] == "--pp=3"  # given explicitly, so it comes last and wins
    assert (variables["PACELINE_GROUP_SIZE"], variables["PACELINE_GROUP_INDEX"]) == ("3", "2")
    assert variables["PACELINE_LEADER"] == "prod-paceline-prefill-4-0.prod-paceline-prefill.serving.svc:7001"


def test_a_pod_that_is_a_group_by_itself_is_the_instance(start) -> None:  # type: ignore[no-untyped-def]
    done = start("decode", POD_NAME="prod-paceline-decode-12", PACELINE_GROUP_SIZE="1", **STATEFULSET)
    arguments, variables = told(done)
    assert arguments[2] == "prod-paceline-decode-12"
    assert not {"PACELINE_GROUP_SIZE", "PACELINE_GROUP_INDEX", "PACELINE_LEADER"} & set(variables)


@pytest.mark.parametrize(("pod", "index"), [("prod-prefill-3", "0"), ("prod-prefill-3-1", "1")])
def test_a_leader_worker_set_says_it_by_its_own_variables(start, pod: str, index: str) -> None:  # type: ignore[no-untyped-def]
    done = start(
        "prefill", POD_NAME=pod, POD_IP="10.1.0.8", LWS_LEADER_ADDRESS="prod-prefill-3.prod-prefill.serving",
        LWS_GROUP_SIZE="2", LWS_WORKER_INDEX=index,
    )  # fmt: skip
    arguments, variables = told(done)
    assert arguments[2] == "prod-prefill-3"
    assert (variables["PACELINE_GROUP_SIZE"], variables["PACELINE_GROUP_INDEX"]) == ("2", index)
    assert variables["PACELINE_LEADER"] == "prod-prefill-3.prod-prefill.serving:7001"


@pytest.mark.parametrize(
    ("index", "question", "answered_by"),
    [
        ("0", "ready", ["health", "127.0.0.1:7001"]),
        ("0", "live", ["health", "--live", "127.0.0.1:7001"]),
        ("1", "ready", ["health", "d-0-0.d.serving.svc:7001"]),
        ("1", "live", ["health", "--live", "127.0.0.1:7001"]),
    ],
)
def test_the_leader_answers_for_its_group(start, index: str, question: str, answered_by: list[str]) -> None:  # type: ignore[no-untyped-def]
    where = {"POD_IP": "10.1.0.7", "PACELINE_HEADLESS": "d.serving.svc", "PACELINE_GROUP_SIZE": "2"}
    assert told(start(question, POD_NAME=f"d-0-{index}", **where))[0] == answered_by


@pytest.mark.parametrize("arguments", [("gateway", "--host=0.0.0.0"), ("up",), ("--help",), ()])
def test_other_commands_go_through_as_they_are(start, arguments: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    given, _ = told(start(*arguments, POD_NAME="prod-paceline-gateway-5d8f-xyz", POD_IP="10.1.0.9"))
    assert given == (list(arguments) or [""])


def test_outside_of_pods_an_instance_is_what_its_options_say(start) -> None:  # type: ignore[no-untyped-def]
    assert told(start("prefill", "--instance", "mine"))[0] == ["prefill", "--instance", "mine"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"POD_NAME": "prefill-5d8f-xyz", "POD_IP": "10.1.0.7"}, "index 'xyz'"),
        (STATEFULSET | {"POD_NAME": "prefill-0", "PACELINE_GROUP_SIZE": "two"}, "group of 'two'"),
        ({"POD_NAME": "prefill-0"}, "POD_IP is not set"),
        ({"POD_NAME": "prefill-0-1", "POD_IP": "10.1.0.7", "PACELINE_GROUP_SIZE": "2"}, "PACELINE_HEADLESS is not set"),
    ],
)
def test_a_pod_that_cannot_know_its_place_says_so(start, variables: dict[str, str], message: str) -> None:  # type: ignore[no-untyped-def]
    done = start("prefill", **variables)
    assert done.returncode == 2 and message in done.stderr
