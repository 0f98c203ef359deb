"""The operators' commands against a real daemon with scripted ranks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from paceline.cli import main
from paceline.config import Cluster, Part
from paceline_proto.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from tests.pipeline.daemon_harness import Daemon, eventually, request
from tests.pipeline.scripted_rank import HANG


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("d")
    daemon = Daemon(folder, ranks={1: {"dump": ""}})
    try:
        address = daemon.when_serving().describe().instance.address
        part = Part(name="prefill-0", role="prefill", address=address, log="")
        Cluster(up_pid=1, url="http://127.0.0.1:1", model_name="m", parts=[part]).write(folder)
        yield daemon
    finally:
        daemon.close()


@pytest.fixture
def registry(daemon: Daemon) -> Iterator[str]:
    """Of a gateway that knows the daemon, and one more instance at an address where nobody is."""

    class Registry(registry_pb2_grpc.RegistryServicer):
        def Watch(self, request: object, context: object) -> Iterator[registry_pb2.WatchResponse]:
            away = registry_pb2.RegisteredInstance()
            away.description.instance.CopyFrom(common_pb2.InstanceRef(instance_id="decode-0", address="127.0.0.1:1"))
            here = registry_pb2.RegisteredInstance(description=daemon.describe(), used=True)
            yield registry_pb2.WatchResponse(instances=[here, away])

    server = grpc.server(futures.ThreadPoolExecutor(1))
    registry_pb2_grpc.add_RegistryServicer_to_server(Registry(), server)  # type: ignore[abstract]  # operators only watch
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def run_dir(daemon: Daemon) -> str:
    return f"--run-dir={daemon.model.parent}"


def test_drain_waits_until_the_instance_is_empty_and_resume_undoes_it(
    daemon: Daemon, run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = daemon.generate(request([HANG], "open"))
    next(call)
    assert main(["drain", "prefill-0", "--reason", "new kernel", "--deadline", "0.3", "--wait", run_dir]) == 0
    assert capsys.readouterr().out == "prefill-0: draining, 1 open\nprefill-0: empty\n"
    assert main(["status", run_dir]) == 0
    assert "not serving: prefill-0 is draining: new kernel" in (shown := capsys.readouterr().out)
    assert "draining: empty, may be stopped" in shown
    assert main(["resume", "prefill-0", run_dir]) == 0
    assert capsys.readouterr().out == "prefill-0: serving\n"


def test_dump_says_where_and_why_not(daemon: Daemon, run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", run_dir]) == 1
    said = "prefill-0: rank 0 /dumps/r0.dump\nprefill-0: rank 1 wrote nothing: the disk is full\n"
    assert capsys.readouterr().err == said


def test_log_level_by_address(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    address = daemon.describe().instance.address
    assert main(["log-level", "--level", "DEBUG", "--logger", "transfer", "--address", address]) == 0
    assert capsys.readouterr().out == f"{address}: transfer logs DEBUG\n"
    eventually("told", lambda: "SetLogLevel(logger='transfer'" in daemon.heard(0))
    assert main(["log-level", "--level", "INFO", "--logger", "transfers", "--address", address]) == 1
    assert "logger is 'transfers'; it is one of" in capsys.readouterr().err


def test_names_are_looked_up_at_a_gateway(daemon: Daemon, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = daemon.describe().instance.instance_id
    assert main(["resume", name, "--registry", registry]) == 0
    assert capsys.readouterr().out == f"{name}: serving\n"
    with pytest.raises(SystemExit, match=f"no instance prefill-9 here; there are {name}, decode-0"):
        main(["resume", "prefill-9", "--registry", registry])
    with pytest.raises(SystemExit, match=r"which instances\? Name them"):
        main(["drain", "--registry", registry])
    address = daemon.describe().instance.address
    assert main(["resume", "--registry", registry, "--address", address]) == 0, "an address alone means that one"
    assert capsys.readouterr() == (f"{name}: serving\n", "")


def test_mistakes_are_said_before_anything_is_done(daemon: Daemon, run_dir: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"which instances\? Name them"):
        main(["drain", run_dir])
    with pytest.raises(SystemExit, match="no instance decode-7 here; there are prefill-0"):
        main(["drain", "prefill-0", "decode-7", run_dir])
    with pytest.raises(SystemExit, match="no cluster runs in"):
        main(["resume", "prefill-0", f"--run-dir={tmp_path}"])
    assert daemon.status().phase == "serving"


def test_an_instance_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "--address", "127.0.0.1:1", "--timeout", "5"]) == 1
    assert capsys.readouterr().err == "127.0.0.1:1: no answer\n"
