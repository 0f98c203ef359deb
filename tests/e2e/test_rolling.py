"""G6 and rolling replacement: instances leave in good order, and no client notices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline_proto.v1 import admin_pb2
from tests.e2e.cluster import Cluster
from tests.e2e.load import Load, addresses, told, until
from tests.e2e.prompts import prompts, reference
from tests.e2e.test_resume import TOKENS, metric, stream

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
LONG = 23  # the prompt of 3 000 tokens
PICKED = (3, 4, 5, 6, 21, 22)


def paceline(cluster: Cluster, *command: str) -> str:
    """The command line, as an operator uses it."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'proto'}", "PACELINE_RUN_DIR": cluster.folder.name}
    line = [sys.executable, "-m", "paceline.cli", *command]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=120, env=env).stdout


def two_by_two(model: Path, ranks: int) -> Cluster:
    options = ("--chunk-size", "64", "--prefill-instances", "2", "--decode-instances", "2")
    return Cluster(*options, model=model, prefill_pp=ranks, decode_pp=ranks)


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    with two_by_two(tiny, 1) as cluster:
        yield cluster
        cluster.assert_baseline()


def when_back(cluster: Cluster, name: str, address: str, before: admin_pb2.StatusResponse) -> None:
    """`up` has started the instance anew, and the gateway knows."""

    def back() -> bool:
        now = told(address)
        return now is not None and now.pid != before.pid and now.phase == "serving"

    until(f"{name} serves again", back)
    until("the gateway knows", lambda: metric(cluster, "serving_instances") == 4)


def test_G6_a_prefill_told_to_end_waits_until_its_KV_is_taken(cluster: Cluster, tiny: Path) -> None:
    asked, wanted = prompts(tiny), reference(tiny, TOKENS)
    resumed = metric(cluster, "resumed_requests_total")
    prefills, decodes = addresses(cluster, "prefill"), addresses(cluster, "decode")
    frozen = [rank.pid for address in decodes.values() for rank in told(address).ranks]  # type: ignore[union-attr]
    with ThreadPoolExecutor(2) as pool:
        # Given a prompt that is being computed, and decode ranks that stand still and take nothing,
        answer = pool.submit(stream, cluster, asked[LONG])

        def computing() -> str | None:
            for name, address in prefills.items():
                status = told(address)
                if status is not None and status.ranks[0].requests["running"]:
                    return name
            return None

        name = until("a prefill instance computes", computing)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            # when its prefill instance is told to end,
            before = told(prefills[name])
            assert before is not None
            os.kill(before.pid, signal.SIGTERM)
            # then it takes nothing new and waits, though all is computed.
            inflight = until(
                "all is computed", lambda: (now := told(prefills[name])) and now.ranks[0].requests["inflight"] and now
            )
            assert (inflight.phase, inflight.open_attempts, inflight.drain.empty) == ("draining", 1, False)
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        assert answer.result(120) == wanted[LONG]
    # When the KV is taken it ends well, and not before; nothing had to be done again.
    until("it ended", lambda: f"{name} exited with 0" in cluster.output())
    assert metric(cluster, "resumed_requests_total") == resumed
    when_back(cluster, name, prefills[name], before)


def replace_all(cluster: Cluster, names: dict[str, str], deadline: str) -> None:
    """As docs/operations.md has it: drain, wait, end, wait until the new one serves; then the next."""
    for name, address in names.items():
        before = told(address)
        assert before is not None
        assert paceline(cluster, "drain", name, "--deadline", deadline, "--wait").endswith(f"{name}: empty\n")
        os.kill(before.pid, signal.SIGTERM)
        when_back(cluster, name, address, before)
        print(f"{name} replaced", flush=True)


@pytest.mark.parametrize(
    ("names", "deadline"),
    [
        (("decode-0",), "0"),
        *(
            pytest.param(("prefill-0", "prefill-1", "decode-0", "decode-1"), deadline, marks=pytest.mark.soak)
            for deadline in ("60", "0")
        ),
    ],
)
def test_a_rolling_replacement_under_load_fails_no_request(
    cluster: Cluster, tiny: Path, names: tuple[str, ...], deadline: str
) -> None:
    """With time, instances finish what they have; without any, their streams go on elsewhere."""
    moved = metric(cluster, 'resumes_total{reason="draining"}')
    places = addresses(cluster, "prefill") | addresses(cluster, "decode")
    with Load(cluster, tiny, 4, PICKED) as load:
        replace_all(cluster, {name: places[name] for name in names}, deadline)
    print(f"{load.done} requests")
    assert load.done > 4
    assert metric(cluster, 'resumes_total{reason="draining"}') > moved or deadline != "0"
    assert metric(cluster, "resumes_given_up_total") == 0


@pytest.mark.soak
def test_a_rolling_replacement_of_all_of_2x2_instances_of_two_ranks_fails_no_request(tiny: Path) -> None:
    with two_by_two(tiny, 2) as cluster:
        with Load(cluster, tiny, 8, (*PICKED, LONG)) as load:
            for deadline in ("60", "0"):
                replace_all(cluster, addresses(cluster, "prefill") | addresses(cluster, "decode"), deadline)
            print(f"{load.done} requests, 8 instances replaced")
        assert metric(cluster, "resumes_given_up_total") == 0
        cluster.assert_baseline()
