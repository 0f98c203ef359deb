"""An instance daemon with two scripted ranks, from outside: start-up, requests, health, stopping."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc, generation_pb2
from security.folder import make
from tests.pipeline.daemon_harness import Daemon, eventually, is_running, request
from tests.pipeline.scripted_rank import ECHO, FLOOD, HANG

SERVING = health_pb2.HealthCheckResponse.SERVING
Kind = generation_pb2.Outcome


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One serving instance for the tests that leave it as they found it."""
    daemon = Daemon(tmp_path_factory.mktemp("d"), max_queue=3, stream_buffer=50)
    try:
        yield daemon.when_serving()
    finally:
        daemon.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def starter(**settings: Any) -> Daemon:
        daemons.append(Daemon(tmp_path, **settings))
        return daemons[-1]

    yield starter
    for daemon in daemons:
        daemon.close()


def refusal(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def test_describes_itself_while_it_loads_and_serves_when_every_rank_is_ready(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (hold := tmp_path / "model" / "hold").touch()
    daemon = Daemon(tmp_path, ranks={0: {"pages": 70}, 1: {"pages": 64}})
    try:
        loading = eventually("progress of both ranks", lambda: _half_loaded(daemon))
        assert not loading.serving and "rank 1 weights 50%" in loading.not_serving_reason
        assert daemon.health() == daemon.health("paceline.v1.Generation") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert daemon.health("live") == SERVING
        refused = refusal(daemon.generate(request([ECHO])))
        assert refused.code() == grpc.StatusCode.UNAVAILABLE and "is loading" in refused.details()
        status = daemon.status()
        assert (status.phase, [rank.answered for rank in status.ranks]) == ("loading", [False, False])
        hold.unlink()
        serving = daemon.when_serving().describe()
        assert serving.pages == 64 and serving.instance.epoch == 1
        assert [rank.link_address for rank in serving.ranks] == ["tcp://127.0.0.1:9000", "tcp://127.0.0.1:9001"]
        assert serving.transfer_backend == "local" and serving.vocab_size == 1000 and serving.model_name == "model"
        assert daemon.health() == daemon.health("paceline.v1.Generation") == SERVING
        # A rank that starts is told nothing else: it takes these two in turn, and would trip over a question.
        eventually("Go at rank 1", lambda: "Go()" in daemon.heard(1))
        assert daemon.heard(1).splitlines() == ["1 Configure(pages=64)", "1 Go()"]
    finally:
        daemon.close()


def _half_loaded(daemon: Daemon) -> bootstrap_pb2.DescribeResponse | None:
    described = daemon.describe()
    return described if [rank.loaded for rank in described.ranks] == [50, 50] else None


def test_tokens_then_one_outcome(prefill: Daemon) -> None:
    events = list(prefill.generate(request([ECHO, 7, 8], "echo", logprobs=2)))
    tokens = [token for event in events if event.HasField("tokens") for token in event.tokens.tokens]
    assert [token.id for token in tokens] == [ECHO, 7, 8]
    assert tokens[1].logprob == -0.5 and [top.id for top in tokens[1].top] == [7, 9]
    assert [event.HasField("outcome") for event in events].count(True) == 1
    assert events[-1].outcome.kind == Kind.KIND_LENGTH and events[-1].outcome.output_tokens == 3


def test_an_attempt_is_known_for_ever(prefill: Daemon) -> None:
    list(prefill.generate(request([ECHO], "twice")))
    again = refusal(prefill.generate(request([ECHO], "twice")))
    assert again.code() == grpc.StatusCode.ALREADY_EXISTS and "'twice'" in again.details()


def test_a_request_for_another_epoch_is_refused_with_both(prefill: Daemon) -> None:
    message = request([ECHO], "late")
    message.epoch = 9
    refused = refusal(prefill.generate(message))
    assert refused.code() == grpc.StatusCode.UNAVAILABLE
    assert refused.details() == "the request is for epoch 9, but this is epoch 1"
    message.epoch = 1
    assert list(prefill.generate(message))[-1].outcome.kind == Kind.KIND_LENGTH


def test_a_cancelled_call_reaches_rank_0_as_cancel(prefill: Daemon) -> None:
    call = prefill.generate(request([HANG], "cancelled"))
    next(call)
    call.cancel()
    eventually("Cancel at rank 0", lambda: "Cancel(key=Key(request='cancelled'" in prefill.heard(0))
    assert "cancelled" not in prefill.heard(1)


def test_abort_ends_a_running_attempt_and_one_that_has_not_come_yet(prefill: Daemon) -> None:
    call = prefill.generate(request([HANG], "aborted"))
    next(call)
    prefill.abort("aborted")
    assert next(call).outcome == Kind(kind=Kind.KIND_ABORT, reason="stop string", output_tokens=1)
    prefill.abort("early")
    assert [e.outcome.kind for e in prefill.generate(request([ECHO], "early"))] == [Kind.KIND_ABORT]
    prefill.abort("never")


def test_a_full_queue_refuses_with_numbers(prefill: Daemon) -> None:
    calls = [prefill.generate(request([HANG], f"full{i}")) for i in range(3)]
    for call in calls:
        next(call)
    refused = refusal(prefill.generate(request([ECHO], "one too many")))
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.details() == "3 attempts are open here, and max_queue is 3"
    for call in calls:
        call.cancel()
    eventually("all attempts ended", lambda: not prefill.status().ranks[0].requests["running"])


def test_a_reader_that_falls_behind_is_cut_off_with_a_reason(prefill: Daemon) -> None:
    refused = refusal(prefill.generate(request([FLOOD], "flood", max_tokens=51)))
    assert refused.code() == grpc.StatusCode.ABORTED and "behind and was cut off" in refused.details()
    eventually("Cancel at rank 0", lambda: "Cancel(key=Key(request='flood'" in prefill.heard(0))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (request([]), "prompt_ids is empty"),
        (request([1, 1000]), "token id 1000, but the vocabulary ends at 999"),
        (request([1] * 4090, max_tokens=7), "4097 together, but the context has 4096"),
        (request([1] * 1601), "101 pages of 16, but the pool has 100"),
        (request([1], max_tokens=0), "max_tokens is 0"),
        (request([1], top_p=1.5), "top_p is 1.5"),
        (request([1], temperature=float("nan")), "temperature is nan"),
        (request([1], seed=1 << 63), "seed is 9223372036854775808"),
        (request([1], peer="prefill-0"), "this very instance"),
        (request([1], name=""), "request_id has 0 characters"),
        (request([1], name="r" * 201), "request_id has 201 characters"),
        (request([1], name="r\u00e9"), "printable ASCII"),
    ],
)
def test_what_can_never_run_is_refused_with_numbers(
    prefill: Daemon, message: generation_pb2.GenerateRequest, says: str
) -> None:
    refused = refusal(prefill.generate(message))
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert says in refused.details()


def test_status_asks_every_rank_and_garbage_was_dropped_and_counted(prefill: Daemon) -> None:
    status = prefill.status()
    assert (status.phase, status.restarts, status.pid) == ("serving", 0, prefill.process.pid)
    assert [rank.answered for rank in status.ranks] == [True, True]
    assert [(rank.layer_begin, rank.layer_end) for rank in status.ranks] == [(0, 2), (2, 4)]
    assert dict(status.ranks[1].pages) == {"free": 100, "owned": 0}  # a rank's nonsense (-1) breaks nothing
    assert status.ranks[0].digest == "abcd" and status.ranks[0].applied_seq == 7
    assert status.ranks[0].counters["daemon_frames_dropped"] >= 4  # two malformed messages of each rank


def test_a_second_daemon_on_the_port_or_in_the_folder_is_refused(
    prefill: Daemon, start: Callable[..., Daemon], tmp_path: Path
) -> None:
    address = prefill.describe().instance.address
    second = start(listen=address)
    assert second.wait() == 2
    assert f"cannot listen on {address}" in second.log


def test_T14_an_address_that_others_cannot_reach_is_refused(start: Callable[..., Daemon]) -> None:
    daemon = start(listen="0.0.0.0:0", advertise="127.0.0.1")
    assert daemon.wait() == 2
    assert "loopback address 127.0.0.1" in daemon.log


def test_off_loopback_an_instance_needs_secrets_or_insistence(start: Callable[..., Daemon]) -> None:
    daemon = start(listen="0.0.0.0:0", advertise="10.1.2.3")
    assert daemon.wait() == 2
    assert "the prefill instance would listen on 0.0.0.0" in daemon.log
    assert "paceline certs" in daemon.log and "--insecure" in daemon.log


def test_with_secrets_an_instance_answers_members_alone(start: Callable[..., Daemon], tmp_path: Path) -> None:
    make(tmp_path / "secrets")
    daemon = start(secrets=str(tmp_path / "secrets")).when_serving()
    address = daemon.describe().instance.address
    with grpc.insecure_channel(address) as stranger:
        ask = bootstrap_pb2_grpc.BootstrapStub(stranger).Describe
        with pytest.raises(grpc.RpcError) as caught:
            ask(bootstrap_pb2.DescribeRequest(), timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_secrets_that_cannot_be_used_are_refused_at_start(start: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start(secrets=str(tmp_path / "nowhere"))
    assert daemon.wait() == 2
    assert "refused to start" in daemon.log and "paceline certs" in daemon.log


def test_sigterm_ends_streams_with_a_reason_and_leaves_no_process(start: Callable[..., Daemon]) -> None:
    daemon = start(ranks={1: {"ignore_quit": True}}, drain_timeout=0.2).when_serving()
    pids = daemon.pids()
    call = daemon.generate(request([HANG]))
    next(call)
    daemon.process.send_signal(signal.SIGTERM)
    last = list(call)[-1].outcome
    assert (last.kind, last.retryable) == (Kind.KIND_ERROR, True)
    assert last.draining and "draining: received SIGTERM" in last.reason
    assert daemon.wait() == 0
    assert not any(map(is_running, pids))
    assert "Cancel(" in daemon.heard(0) and "Quit()" in daemon.heard(0)


def test_health_is_progress_not_a_process_that_is_up(start: Callable[..., Daemon]) -> None:
    daemon = start().when_serving()
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    eventually("SERVING", lambda: daemon.health() == serving)
    (daemon.model / "stuck").touch()
    eventually("NOT_SERVING", lambda: daemon.health() == not_serving)
    assert "no progress: tick 9 (3 rows) has not returned" in daemon.log
    (daemon.model / "stuck").unlink()
    eventually("SERVING again", lambda: daemon.health() == serving)


def test_sigterm_lets_open_requests_end_and_takes_no_new_ones(start: Callable[..., Daemon]) -> None:
    daemon = start(drain_timeout=60).when_serving()
    call = daemon.generate(request([HANG]))
    next(call)
    daemon.process.send_signal(signal.SIGTERM)
    eventually("not serving", lambda: not daemon.describe().serving)
    with pytest.raises(grpc.RpcError) as refused:
        list(daemon.generate(request([ECHO], name="late")))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE and "draining" in refused.value.details()
    assert daemon.process.poll() is None, "it waits for the open one"
    daemon.abort("r")
    assert list(call)[-1].outcome.kind == Kind.KIND_ABORT
    assert daemon.wait() == 0
