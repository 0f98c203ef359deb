"""What a daemon does when its ranks, or it itself, die, hang or refuse: as a whole, with a reason, and again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_proto.v1 import generation_pb2
from tests.pipeline.daemon_harness import Daemon, eventually, is_running, request
from tests.pipeline.scripted_rank import ECHO, HANG, SUICIDE

Kind = generation_pb2.Outcome


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def starter(**settings: Any) -> Daemon:
        daemons.append(Daemon(tmp_path, **settings))
        return daemons[-1]

    yield starter
    for daemon in daemons:
        daemon.close()


def hang(daemon: Daemon, name: str) -> Any:
    """A request that has begun and will not end by itself."""
    call = daemon.generate(request([HANG], name))
    next(call)
    return call


def test_failures_end_the_whole_epoch_and_the_next_one_serves(start: Callable[..., Daemon]) -> None:
    daemon = start(ring_timeout=2).when_serving()

    # Given open requests, when one rank is killed,
    first, calls = daemon.pids(), [hang(daemon, "a"), hang(daemon, "b")]
    os.kill(first[1], signal.SIGKILL)
    # then each stream ends with an error that names it, and by then every rank is gone.
    for call in calls:
        outcome = list(call)[-1].outcome
        assert (outcome.kind, outcome.retryable) == (Kind.KIND_ERROR, True)
        assert "rank 1 was killed by SIGKILL" in outcome.reason and "prefill-0 (epoch 1)" in outcome.reason
        assert not any(map(is_running, first))
    daemon.when_serving(epoch=2)
    status = daemon.status()
    assert status.restarts == 1 and "rank 1 was killed by SIGKILL" in status.last_failure
    assert list(daemon.generate(request([ECHO], "c")))[-1].outcome.kind == Kind.KIND_LENGTH

    # When a rank stands still, it is found within ring_timeout; being stopped, it cannot say so.
    second = daemon.pids()
    call = hang(daemon, "d")
    os.kill(second[0], signal.SIGSTOP)
    assert "rank 0 was silent for" in list(call)[-1].outcome.reason
    assert not any(map(is_running, second))
    daemon.when_serving(epoch=3)

    # When a rank fails by itself, its own words travel.
    outcome = list(daemon.generate(request([SUICIDE], "e")))[-1].outcome
    assert "rank 0 failed: digest mismatch at seq 41 in field pages" in outcome.reason
    daemon.when_serving(epoch=4)
    assert "[prefill-0 rank 0] failing: digest mismatch" in daemon.log


def test_a_killed_daemon_leaves_no_rank_and_its_successor_has_a_higher_epoch(start: Callable[..., Daemon]) -> None:
    daemon = start().when_serving()
    pids = daemon.pids()
    daemon.process.kill()
    eventually("the end of all ranks", lambda: not any(map(is_running, pids)))
    assert start().when_serving().describe().instance.epoch == 2


def test_a_rank_that_refuses_its_model_twice_ends_the_daemon(start: Callable[..., Daemon]) -> None:
    daemon = start(ranks={1: {"exit_load": "ValueError: tensor model.norm.weight is missing"}})
    assert daemon.wait() == 1
    assert "giving up: rank 1 exited with code 5; its last line: ValueError: tensor model.norm.weight" in daemon.log


def test_a_mute_rank_is_listed_with_what_was_known(start: Callable[..., Daemon]) -> None:
    daemon = start(role="decode", ranks={1: {"mute_status": True}}).when_serving()
    ranks = daemon.status().ranks
    assert [rank.answered for rank in ranks] == [True, False]
    assert ranks[1].pid and ranks[1].applied_seq == 7
    assert daemon.describe().ranks[0].link_address == ""
