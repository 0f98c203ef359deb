"""What operators tell an instance: to drain and resume, to write recordings, to log more. Real daemon, scripted ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from paceline_proto.v1 import admin_pb2, generation_pb2
from tests.pipeline.daemon_harness import Daemon, eventually, request
from tests.pipeline.scripted_rank import ECHO, HANG

Kind = generation_pb2.Outcome
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


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


def drain(daemon: Daemon, deadline: float, reason: str = "new kernel") -> admin_pb2.DrainResponse:
    return daemon.admin.Drain(admin_pb2.DrainRequest(reason=reason, deadline_s=deadline), timeout=10)


def refusal(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def test_a_drained_instance_finishes_what_it_has_takes_nothing_and_serves_again_when_resumed(
    start: Callable[..., Daemon],
) -> None:
    daemon = start().when_serving()
    open_one = hang(daemon, "open")

    # Given an open request, when the instance is drained,
    answer = drain(daemon, 600)
    assert (answer.phase, answer.open_attempts) == ("draining", 1)
    # then it says so everywhere, to peers that it still finishes what it has,
    described = daemon.describe()
    assert (described.serving, described.draining) == (False, True)
    assert described.not_serving_reason == "prefill-0 is draining: new kernel"
    eventually("NOT_SERVING", lambda: daemon.health() == NOT_SERVING)
    status = daemon.status()
    assert (status.phase, status.open_attempts, status.drain.empty) == ("draining", 1, False)
    assert 500 < status.drain.remaining_s <= 600
    # refuses what is new in a way that cannot be taken for a failure,
    refused = refusal(lambda: list(daemon.generate(request([ECHO], "new"))))
    assert refused.code() == grpc.StatusCode.UNAVAILABLE and "is draining: new kernel" in refused.details()
    assert ("paceline-draining", "1") in [tuple(pair) for pair in refused.trailing_metadata()]
    # and lets the open one end by itself; then it is empty.
    daemon.abort("open")
    assert list(open_one)[-1].outcome.kind == Kind.KIND_ABORT
    assert daemon.status().drain.empty

    # When it is resumed, once or twice, it serves again.
    for _ in range(2):
        assert daemon.admin.Resume(admin_pb2.ResumeRequest(), timeout=10).phase == "serving"
    eventually("SERVING", lambda: daemon.health() == SERVING)
    assert list(daemon.generate(request([ECHO], "after")))[-1].outcome.kind == Kind.KIND_LENGTH
    assert not daemon.status().HasField("drain")


def test_at_the_deadline_of_a_drain_what_is_open_may_go_on_elsewhere(start: Callable[..., Daemon]) -> None:
    daemon = start().when_serving()
    call = hang(daemon, "long")
    drain(daemon, 600)
    drain(daemon, 0, "now")  # a drain under way takes another reason and deadline
    outcome = list(call)[-1].outcome
    assert (outcome.kind, outcome.retryable, outcome.draining) == (Kind.KIND_ERROR, True, True)
    assert outcome.reason == "prefill-0 is draining: now"
    eventually("an empty instance", lambda: daemon.status().drain.empty)
    assert daemon.process.poll() is None and daemon.status().phase == "draining"


def test_a_drain_outlives_the_ranks(start: Callable[..., Daemon]) -> None:
    daemon = start().when_serving()
    call = hang(daemon, "open")
    drain(daemon, 600)
    os.kill(daemon.pids()[1], signal.SIGKILL)
    outcome = list(call)[-1].outcome
    assert outcome.retryable and not outcome.draining and "rank 1 was killed" in outcome.reason
    eventually("ranks of the next epoch", lambda: daemon.status().restarts == 1 and daemon.describe().draining)
    assert "draining" in refusal(lambda: list(daemon.generate(request([ECHO], "new")))).details()
    daemon.admin.Resume(admin_pb2.ResumeRequest(), timeout=10)
    assert list(daemon.generate(request([ECHO], "after")))[-1].outcome.kind == Kind.KIND_LENGTH


def test_a_stop_is_a_drain_that_cannot_be_undone_and_a_second_one_hurries(start: Callable[..., Daemon]) -> None:
    daemon = start(drain_timeout=600).when_serving()
    call = hang(daemon, "open")
    daemon.process.send_signal(signal.SIGTERM)
    eventually("draining", lambda: daemon.status().phase == "draining")
    for undo in (
        lambda: daemon.admin.Resume(admin_pb2.ResumeRequest(), timeout=10),
        lambda: drain(daemon, 1200),
    ):
        refused = refusal(undo)
        assert refused.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert refused.details() == "prefill-0 is stopping: received SIGTERM"
    daemon.process.send_signal(signal.SIGTERM)
    assert "prefill-0 is gone: received SIGTERM" in list(call)[-1].outcome.reason
    assert daemon.wait() == 0


def test_recordings_of_all_ranks_and_why_one_is_missing(start: Callable[..., Daemon]) -> None:
    daemon = start(ranks={1: {"dump": ""}}).when_serving()
    dumped = daemon.admin.DumpFlight(admin_pb2.DumpFlightRequest(reason="looking"), timeout=10).ranks
    assert [(rank.rank, rank.path, rank.error) for rank in dumped] == [
        (0, "/dumps/r0.dump", ""),
        (1, "", "the disk is full"),
    ]
    assert "Dump(token=1, reason='looking')" in daemon.heard(0)


def test_nobody_waits_for_a_recording_of_ranks_that_are_gone(start: Callable[..., Daemon]) -> None:
    daemon = start(ring_timeout=30.0).when_serving()
    first, second = daemon.pids()
    os.kill(second, signal.SIGSTOP)
    asked = admin_pb2.DumpFlightRequest(reason="looking")
    waiting = [daemon.admin.DumpFlight.future(asked, timeout=8) for _ in range(2)]  # a rank has 10 s to answer
    eventually("the question", lambda: "Dump(" in daemon.heard(0))
    os.kill(first, signal.SIGKILL)
    for answer in waiting:
        assert [rank.error for rank in answer.result().ranks][1] == "it did not answer in time"
    daemon.when_serving(epoch=2)


def test_a_log_level_reaches_the_daemon_and_the_ranks_of_every_epoch(start: Callable[..., Daemon]) -> None:
    daemon = start().when_serving()
    asked = admin_pb2.SetLogLevelRequest(level="DEBUG", logger="transfer")
    assert not daemon.admin.SetLogLevel(asked, timeout=10).silent_ranks
    eventually("rank 1 heard", lambda: "1 SetLogLevel(logger='transfer', level='DEBUG')" in daemon.heard(1))
    os.kill(daemon.pids()[0], signal.SIGKILL)
    daemon.when_serving(epoch=2)
    eventually("rank 1 heard again", lambda: "2 SetLogLevel(logger='transfer', level='DEBUG')" in daemon.heard(1))


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda admin: admin.Drain(admin_pb2.DrainRequest(deadline_s=-1)), "deadline_s is -1; it must be between 0"),
        (lambda admin: admin.Drain(admin_pb2.DrainRequest(deadline_s=float("nan"))), "deadline_s is nan"),
        (lambda admin: admin.Drain(admin_pb2.DrainRequest(reason="x" * 201)), "reason has 201 characters"),
        (lambda admin: admin.DumpFlight(admin_pb2.DumpFlightRequest(reason="a\nb")), "reason has 3 characters"),
        (lambda admin: admin.SetLogLevel(admin_pb2.SetLogLevelRequest(level="LOUD")), "one of DEBUG, INFO"),
        (
            lambda admin: admin.SetLogLevel(admin_pb2.SetLogLevelRequest(level="INFO", logger="transfer.io")),
            "logger is 'transfer.io'; it is one of",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_limit(serving: Daemon, ask: Callable[[Any], Any], says: str) -> None:
    refused = refusal(lambda: ask(serving.admin))
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT and says in refused.details()
    assert serving.status().phase == "serving"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("d"))
    try:
        yield daemon.when_serving()
    finally:
        daemon.close()
