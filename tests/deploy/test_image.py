"""The image that `make image` builds, started as a pod's containers are: as nobody, without capabilities, on a root file
system that cannot be written; a cluster inside it answers. Marker `image`: needs root, podman and runc.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.deploy.variants import ROOT

pytestmark = [pytest.mark.image, pytest.mark.timeout(600)]

DEADLINE_S = 300.0
QUESTION = """
import json, urllib.request
body = {"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 16,
        "messages": [{"role": "user", "content": "What is the capital of France?"}]}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=120).read().decode())
"""


def image() -> str:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    return os.environ.get("PACELINE_IMAGE") or f"localhost/paceline-smollm2:{version[1]}-cpu"


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["podman", "--runtime", "runc", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
    return done


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The name of a container in which a cluster of 2 + 2 ranks serves, with no network but its own loopback."""
    if shutil.which("podman") is None or podman("image", "exists", image(), check=False).returncode:
        pytest.fail(f"podman or the image {image()} is missing: apt-get install podman runc; make image")
    name = f"paceline-image-{uuid.uuid4().hex[:8]}"
    podman(
        "run", "--detach", "--name", name, "--network", "none", "--no-healthcheck", "--read-only", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--ulimit", "nofile=1024:20000", "--ulimit", "nproc=1024:1024",
        "--tmpfs", "/tmp:mode=1777", "--mount", "type=volume,destination=/run/paceline", "--shm-size", "1g",
        image(), "up", "--port", "8000", "--kv-memory", "64M", "--host-memory", "64M",
    )  # fmt: skip
    try:
        until = time.monotonic() + DEADLINE_S
        while (health := podman("exec", name, "paceline", "health", check=False)).returncode:
            log = podman("logs", name)
            assert time.monotonic() < until, f"not healthy: {health.stderr}\n{log.stdout}{log.stderr}"
            assert podman("inspect", "--format", "{{.State.Running}}", name).stdout == "true\n", log.stdout + log.stderr
            time.sleep(1)
        yield name
    finally:
        podman("rm", "--force", "--volumes", "--time", "5", name, check=False)


def test_the_cluster_in_the_image_answers(cluster: str) -> None:
    answer = json.loads(podman("exec", cluster, "python", "-c", QUESTION).stdout)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_it_runs_as_nobody_and_can_write_only_where_it_must(cluster: str) -> None:
    assert podman("exec", cluster, "id", "-u").stdout == "10001\n"
    for place in ("/", "/opt/paceline", "/models", "/usr/local/bin"):
        assert podman("exec", cluster, "touch", f"{place}/new", check=False).returncode != 0
    assert podman("exec", cluster, "grep", "CapEff", "/proc/self/status").stdout.split()[1] == "0" * 16


def test_nothing_in_it_compiles_installs_or_raises_privileges(cluster: str) -> None:
    script = (
        "for tool in cc gcc g++ c++ clang ld as make pip pip3 uv; do command -v $tool; done; "
        "python -m pip --version 2>/dev/null; find / -xdev -perm /6000 -type f 2>/dev/null; true"
    )
    assert podman("exec", cluster, "sh", "-c", script).stdout == ""


def test_every_transfer_backend_loads(cluster: str) -> None:
    script = "import mooncake.engine, nixl, transfer.io.stream.engine, torch; print(torch.__version__)"
    assert podman("exec", cluster, "python", "-c", script).stdout.startswith("2.")


def test_attention_has_its_compiled_kernel_for_every_processor(cluster: str) -> None:
    script = (
        "from engine.native import build, kernel; assert kernel.best(); "
        "print(all(variant.path().exists() for variant in build.variants()))"
    )
    assert podman("exec", cluster, "python", "-c", script).stdout == "True\n"


def test_sigterm_ends_it_in_order(cluster: str) -> None:
    """Last in the file: it ends the cluster."""
    podman("stop", "--time", "60", cluster)
    assert podman("inspect", "--format", "{{.State.ExitCode}}", cluster).stdout in ("0\n", "143\n")
