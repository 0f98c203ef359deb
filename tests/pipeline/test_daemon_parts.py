"""Parts of the daemon alone: addresses, the run folder, streams, the control socket."""

from __future__ import annotations

import asyncio
import random
import stat
from pathlib import Path

import msgspec
import pytest
import zmq

from consensus.entry import Key, RequestSpec, TokenOut
from pipeline.io import control
from pipeline.io.address import BadAddress, advertised_host, split_host_port
from pipeline.io.admission import Limits, Refused, spec_of
from pipeline.io.attempts import AlreadyKnown, Attempts, QueueFull, TokenRun
from pipeline.io.control_socket import ControlSocket
from pipeline.io.instance_config import ConfigError, DaemonConfig
from pipeline.io.run_folder import RunFolder, RunFolderError
from pipeline.outcome import ABORT, ERROR, STOP, Outcome
from tests.pipeline.daemon_harness import request

A, B = Key("a", 0), Key("b", 0)


@pytest.mark.parametrize(
    ("listen", "advertise", "told"),
    [("127.0.0.1:1", "", "127.0.0.1"), ("0.0.0.0:1", "10.1.2.3", "10.1.2.3"), ("[::1]:1", "", "::1"),
     ("10.1.2.3:1", "", "10.1.2.3"), ("127.0.0.1:1", "localhost", "localhost")],
)  # fmt: skip
def test_reachable_addresses_are_told(listen: str, advertise: str, told: str) -> None:
    assert advertised_host(listen, advertise) == told


@pytest.mark.parametrize(
    ("listen", "advertise", "says"),
    [("0.0.0.0:1", "", "needs an explicit advertise host .--advertise"), ("0.0.0.0:1", "localhost", "loopback"),
     ("10.1.2.3:1", "127.0.0.1", "loopback"), ("0.0.0.0:1", "0.0.0.0", "not the address of a host"),
     ("127.0.0.1:1", "10.1.2.3", "cannot be reached"), ("host", "", "not host:port"), ("h:99999", "", "not host:port")],
)  # fmt: skip
def test_unreachable_addresses_are_refused(listen: str, advertise: str, says: str) -> None:
    with pytest.raises(BadAddress, match=says):
        advertised_host(listen, advertise)


def test_ipv6_listen_address() -> None:
    assert split_host_port("[::]:50051") == ("::", 50051)


def test_config_errors_name_the_field() -> None:
    good = DaemonConfig(instance="p", model="m", run_dir="r", role="prefill", rank_module="a.b")
    good.check()
    for change in (
        {"pp_size": 0},
        {"instance": "a b"},
        {"ring_timeout": 0},
        {"pages": 0, "kv_bytes": 0},
        {"role": "x"},
    ):
        with pytest.raises(ConfigError, match=next(iter(change))):
            msgspec.structs.replace(good, **change).check()


def test_epochs_grow_over_restarts_and_the_folder_has_one_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.io.run_folder._LOCK_PATIENCE_S", 0.1)
    first, second = RunFolder(str(tmp_path / "r")), RunFolder(str(tmp_path / "r"))
    first.take()
    assert [first.next_epoch(1), first.next_epoch(1), first.next_epoch(10), first.next_epoch(1)] == [1, 2, 10, 11]
    private = first.open_epoch(11)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    with pytest.raises(RunFolderError, match="in use by another daemon"):
        second.take()
    first.release()
    second.take()
    assert not private.exists() and second.next_epoch(1) == 12
    (tmp_path / "r" / "epoch").write_text("seven")
    with pytest.raises(RunFolderError, match="'seven', not a number"):
        second.next_epoch(1)
    second.release()
    with pytest.raises(RunFolderError, match="characters"):
        RunFolder("/tmp/" + "x" * 90)


def test_a_stream_merges_runs_and_ends_once() -> None:
    async def scenario() -> None:
        cancelled: list[tuple[Key, str]] = []
        attempts = Attempts(2, 4, lambda key, reason: cancelled.append((key, reason)))
        stream, other = attempts.open(A), attempts.open(B)
        with pytest.raises(AlreadyKnown):
            attempts.open(A)
        with pytest.raises(QueueFull):
            attempts.open(Key("c", 0))
        for position in (0, 1, 5):
            attempts.tokens(control.Tokens(A, position, (TokenOut(position),)))
        attempts.ended(control.Ended(A, Outcome(STOP)))
        attempts.ended(control.Ended(A, Outcome(ABORT)))  # twice: counted, not told
        assert attempts.unknown == 1
        told = [await stream.next() for _ in range(3)]
        assert told == [TokenRun(0, [TokenOut(0), TokenOut(1)]), TokenRun(5, [TokenOut(5)]), Outcome(STOP)]
        attempts.tokens(control.Tokens(B, 0, (TokenOut(1),) * 5))  # one more than its buffer holds
        attempts.tokens(control.Tokens(B, 5, (TokenOut(1),)))
        assert other.overflowed and other.waiting == 0 and len(cancelled) == 1
        attempts.leave(B, "gone")
        assert len(attempts) == 1 and len(cancelled) == 1  # still known, and cancelled once
        attempts.fail_all("dead")
        assert len(attempts) == 0
        with pytest.raises(AlreadyKnown):
            attempts.open(B)

    asyncio.run(scenario())


def test_a_burst_is_cut_into_messages_that_clients_accept() -> None:
    async def scenario() -> None:
        stream = Attempts(1, 1000, lambda key, reason: None).open(A)
        assert stream.push(0, (TokenOut(5),) * 600) and stream.push(600, (TokenOut(5),))
        runs = [await stream.next() for _ in range(3)]
        assert [(run.position, len(run.tokens)) for run in runs if isinstance(run, TokenRun)] == [
            (0, 256), (256, 256), (512, 89),
        ]  # fmt: skip

    asyncio.run(scenario())


def test_decode_needs_pages_for_prompt_and_output() -> None:
    limits = Limits(
        role="decode", instance="d", vocab_size=1000, max_model_len=4096, page_size=16, pages=2, default_timeout_s=60
    )
    spec = spec_of(request([1] * 30, max_tokens=2, logprobs=0), limits)
    assert (spec.key, spec.timeout, spec.params.logprobs) == (Key("r", 0), 60_000_000, 0)
    with pytest.raises(Refused, match="prompt and output of 33 tokens need 3 pages of 16, but the pool has 2"):
        spec_of(request([1] * 30, max_tokens=3), limits)
    assert spec_of(request([1] * 32, max_tokens=3), msgspec.structs.replace(limits, role="prefill"))


def test_resumed_tokens_are_part_of_the_output() -> None:
    limits = Limits(
        role="decode", instance="d", vocab_size=1000, max_model_len=40, page_size=16, pages=2, default_timeout_s=60
    )

    def resuming(prompt_ids: int, resumed: int, max_tokens: int) -> RequestSpec:
        message = request([1] * prompt_ids, max_tokens=max_tokens)
        message.resumed = resumed
        return spec_of(message, limits)

    spec = resuming(31, 10, 11)
    assert (len(spec.prompt), spec.resumed, spec.params.max_tokens) == (31, 10, 11)
    with pytest.raises(Refused, match="prompt and output of 33 tokens need 3 pages"):
        resuming(31, 10, 12)
    with pytest.raises(Refused, match=r"resumed is 10; it must be less than the 31 prompt_ids .* max_tokens, 10"):
        resuming(31, 10, 10)
    with pytest.raises(Refused, match="resumed is 31"):
        resuming(31, 31, 32)


def test_the_ranks_death_is_every_open_attempts_outcome() -> None:
    async def scenario() -> None:
        attempts = Attempts(2, 4, lambda key, reason: None)
        stream = attempts.open(A)
        attempts.tokens(control.Tokens(A, 0, (TokenOut(3),)))
        assert attempts.fail_all("rank 1 died") == 1
        assert await stream.next() == TokenRun(0, [TokenOut(3)])
        assert await stream.next() == Outcome(ERROR, "rank 1 died", 0, retryable=True)

    asyncio.run(scenario())


def test_the_control_socket_survives_any_bytes_and_hears_the_good_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        heard: list[tuple[int, control.ToDaemon]] = []
        endpoint = f"ipc://{tmp_path}/c"
        ours = ControlSocket(endpoint, range(2), 8, lambda rank, message: heard.append((rank, message)))
        rank, stranger = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        rank.setsockopt(zmq.IDENTITY, b"1")
        for peer in (rank, stranger):
            peer.connect(endpoint)
        assert not ours.send(0, control.Go())  # nobody there: said, not swallowed
        alive = msgspec.msgpack.encode(control.Alive(1))
        chance = random.Random(1)
        for _ in range(500):
            rank.send(chance.randbytes(chance.randrange(40)))
            cut = bytearray(alive)
            cut[chance.randrange(len(cut))] ^= chance.randrange(1, 256)
            rank.send(bytes(cut))
        stranger.send(alive)
        rank.send_multipart([alive, alive])
        rank.send(msgspec.msgpack.encode(control.Failing("last")))
        async with asyncio.timeout(20):
            while (1, control.Failing("last")) not in heard or "not one of our ranks" not in ours.dropped:
                await asyncio.sleep(0.01)
        assert ours.dropped["not one frame"] == 1 and ours.dropped["does not decode"] >= 500
        assert all(rank == 1 for rank, _ in heard)
        assert ours.send(1, control.Go()) and await asyncio.to_thread(rank.poll, 5000)
        ours.close()
        context.destroy(linger=0)

    asyncio.run(scenario())
