"""`paceline status` tells all of admin.proto, to people and to programs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.asked import Known
from paceline.cli import main
from paceline.config import Cluster, Part, free_ports
from paceline.status import instance_report, rank_report
from paceline.status_table import counted, render
from paceline_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    bootstrap_pb2,
    bootstrap_pb2_grpc,
    common_pb2,
    registry_pb2,
    registry_pb2_grpc,
)

RANKS = [
    admin_pb2.RankStatus(
        rank=rank, pid=100 + rank, answered=True, layer_begin=19 * rank, layer_end=19 + 11 * rank, epoch=3,
        applied_seq=17, digest="abcdef0123456789", queues={"waiting": 2, "inflight": 0}, requests={"running": 1},
        pages={"free": 60, "owned": 4, "cached": 0, "quarantined": 0}, rooms=1, store_entries=5, transfer_handles=7,
        last_progress_s=0.25, counters={"tokens_generated": 12}, executing="tick 17 (8 rows) for 0.4 s",
    )
    for rank in (1, 0)
]  # fmt: skip
STATUS = admin_pb2.StatusResponse(
    instance=common_pb2.InstanceRef(instance_id="prefill-0", address="127.0.0.1:1", epoch=3),
    role=common_pb2.ROLE_PREFILL, phase="serving", ranks=RANKS, restarts=2, last_failure="rank 1 was killed", pid=99,
)  # fmt: skip
DESCRIBED = bootstrap_pb2.DescribeResponse(
    serving=False,
    not_serving_reason="rank 1 loads",
    model_name="tiny",
    page_size=16,
    pages=64,
    transfer_backend="mooncake",
)


REGISTERED: list[registry_pb2.RegisteredInstance] = []


class Scripted(admin_pb2_grpc.AdminServicer, bootstrap_pb2_grpc.BootstrapServicer):
    def __init__(self, mute: bool) -> None:
        self.mute = mute

    async def Status(self, request: object, context: object) -> admin_pb2.StatusResponse:
        if self.mute:
            await asyncio.sleep(60)
        return STATUS

    async def Describe(self, request: object, context: object) -> bootstrap_pb2.DescribeResponse:
        return DESCRIBED


class ScriptedRegistry(registry_pb2_grpc.RegistryServicer):
    async def Watch(self, request: object, context: object) -> AsyncIterator[registry_pb2.WatchResponse]:  # type: ignore[override]
        yield registry_pb2.WatchResponse(instances=REGISTERED)

    async def Register(self, request: object, context: object) -> registry_pb2.RegisterResponse:
        raise AssertionError("operators register nothing")

    async def Leave(self, request: object, context: object) -> registry_pb2.LeaveResponse:
        raise AssertionError("operators let nobody leave")


@contextmanager
def instance(mute: bool = False) -> Iterator[str]:
    """An instance on a loop of its own, since the command runs one itself."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        scripted = Scripted(mute)  # type: ignore[abstract]  # what `status` never asks
        admin_pb2_grpc.add_AdminServicer_to_server(scripted, server)
        bootstrap_pb2_grpc.add_BootstrapServicer_to_server(scripted, server)
        registry_pb2_grpc.add_RegistryServicer_to_server(ScriptedRegistry(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["status", *arguments])
        return code, capsys.readouterr().out

    return run


def test_json_holds_everything_under_stable_keys(shown: Callable[..., tuple[int, str]]) -> None:
    with instance() as address:
        code, out = shown("--json", "--address", address)
    report = json.loads(out)
    assert code == 0
    assert report["gateway"] is None
    told = report["instances"][0]
    ranks = told.pop("ranks")
    assert told == {
        "instance": "prefill-0", "role": "prefill", "address": address, "error": "", "epoch": 3, "phase": "serving",
        "pid": 99, "restarts": 2, "last_failure": "rank 1 was killed", "serving": False,
        "not_serving_reason": "rank 1 loads", "model_name": "tiny", "page_size": 16, "pool_pages": 64, "kv_dtype": "",
        "open_attempts": 0, "drain": None, "transfer_backend": "mooncake", "routed": "",
    }  # fmt: skip
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert ranks[1] == {
        "rank": 1, "pid": 101, "answered": True, "layers": [19, 30], "epoch": 3, "applied_seq": 17,
        "digest": "abcdef0123456789", "queues": {"inflight": 0, "waiting": 2}, "requests": {"running": 1},
        "pages": {"cached": 0, "free": 60, "owned": 4, "quarantined": 0}, "rooms": 1, "store_entries": 5,
        "transfer_handles": 7, "last_progress_s": 0.25, "counters": {"tokens_generated": 12},
        "executing": "tick 17 (8 rows) for 0.4 s",
        "audit": "",
        "host": "",
    }  # fmt: skip


def test_the_json_names_every_field_of_a_rank() -> None:
    fields = {field.name for field in admin_pb2.RankStatus.DESCRIPTOR.fields} - {"layer_begin", "layer_end"}
    assert set(rank_report(RANKS[0])) == fields | {"layers"}


def test_the_table_is_aligned_and_says_what_matters(shown: Callable[..., tuple[int, str]]) -> None:
    with instance() as address:
        code, out = shown("--address", address)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"prefill-0   prefill   {address}   serving   epoch 3   tiny   KV by mooncake"
    assert lines[1] == "  not serving: rank 1 loads"
    assert lines[2] == "  ranks restarted 2×; last: rank 1 was killed"
    heading, *ranks = lines[3:6]
    for column, values in {
        "layers": ("0–18", "19–29"),
        "pages": ("free 60, owned 4",) * 2,
        "doing": ("tick 17",) * 2,
    }.items():
        at = heading.index(column)
        assert [rank[at:].startswith(value) for rank, value in zip(ranks, values, strict=True)] == [True, True]
    assert "  all ranks agree" in lines
    assert "  rank 0 counted: tokens_generated 12" in lines


def test_all_that_a_gateway_knows_is_asked_and_what_it_does_not_use_is_said(
    shown: Callable[..., tuple[int, str]],
) -> None:
    with instance() as address:
        known = bootstrap_pb2.DescribeResponse(instance=common_pb2.InstanceRef(instance_id="p", address=address))
        REGISTERED.append(registry_pb2.RegisteredInstance(description=known, status="it was unreachable"))
        code, out = shown("--registry", address)
        REGISTERED.clear()
    assert code == 0
    assert f"prefill-0   prefill   {address}" in out
    assert "  not used by the gateway: it was unreachable" in out.splitlines()


def test_a_registry_that_does_not_answer_is_said(shown: Callable[..., tuple[int, str]]) -> None:
    nobody = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    with pytest.raises(SystemExit, match=f"the registry at {nobody}: no answer$"):
        shown("--timeout", "0.5", "--registry", nobody)


def test_the_table_says_on_which_host_a_rank_runs_if_there_are_several(shown: Callable[..., tuple[int, str]]) -> None:
    told = [dict(rank_report(rank), host=f"10.0.0.{4 + rank.rank}") for rank in RANKS]
    report = instance_report(Known("a:1"), DESCRIBED, STATUS, "") | {"ranks": told}
    heading, first, second = render({"gateway": None, "instances": [report]}).splitlines()[3:6]
    at = heading.index("host")
    assert first[at:].startswith("10.0.0.5 ") and second[at:].startswith("10.0.0.4 ")


def test_an_instance_that_does_not_answer_is_named_and_fails(shown: Callable[..., tuple[int, str]]) -> None:
    nobody = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    with instance() as address:
        code, out = shown("--timeout", "0.5", "--address", address, nobody)
    assert code == 1
    assert "prefill-0" in out
    assert f"{nobody}   NO ANSWER" in out


def test_a_mute_instance_does_not_hang_the_command(shown: Callable[..., tuple[int, str]]) -> None:
    with instance(mute=True) as address:
        code, out = shown("--json", "--timeout", "0.5", "--address", address)
    assert code == 1
    assert json.loads(out)["instances"][0]["error"] == "no answer"


def test_instances_of_a_local_cluster_are_found(shown: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    with instance() as address:
        parts = [
            Part(name="prefill-0", role="prefill", address=address, log="x"),
            Part(name="gateway", role="gateway", address="127.0.0.1:9", log="x"),
        ]
        Cluster(up_pid=1, url="http://127.0.0.1:9", model_name="tiny", parts=parts).write(tmp_path)
        code, out = shown("--run-dir", str(tmp_path))
    assert code == 0
    assert out.startswith("gateway    http://127.0.0.1:9   no answer\n\nprefill-0")


def test_no_cluster_is_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no cluster runs in .*start one with `paceline up`"):
        main(["status", "--run-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"no cluster runs in {Path.cwd()}/nowhere;"):
        main(["status", "--run-dir", "nowhere"])


@pytest.mark.parametrize(
    ("phase", "said"), [("loading", "101 loading"), ("restarting", "101 restarting"), ("serving", "101 NO ANSWER")]
)
def test_a_rank_that_cannot_answer_yet_is_not_called_silent(phase: str, said: str) -> None:
    status = admin_pb2.StatusResponse(phase=phase, ranks=[admin_pb2.RankStatus(rank=0, pid=101, layer_end=30)])
    told = instance_report(Known("a:1", "p", "prefill"), bootstrap_pb2.DescribeResponse(), status, "")
    out = render({"gateway": None, "instances": [told]})
    assert said in out
    assert "s ago" not in out


def test_counts_leave_out_zeros() -> None:
    assert counted({"a": 1, "b": 0, "c": 3}) == "a 1, c 3"
    assert counted({"b": 0}) == "-"
