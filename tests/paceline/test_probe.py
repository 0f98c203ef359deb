"""`paceline health` answers by its exit code what a kubelet wants to know, of an instance and of a gateway."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.cli import main
from paceline.config import free_ports
from security.channels import bind
from security.folder import make

State = health_pb2.HealthCheckResponse


@pytest.fixture
def instance() -> Iterator[tuple[str, health.HealthServicer]]:
    """The health service of grpc's own, at an address."""
    server, servicer = grpc.server(futures.ThreadPoolExecutor(2)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address, servicer
    server.stop(None)


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[int]]]:
    """An HTTP server that answers with the status in the list."""
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0])
            self.end_headers()
            self.wfile.write(b'{"reason": "no decode instance"}')

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/health", status
        server.shutdown()


def test_an_instance_that_serves_is_healthy(instance: tuple[str, health.HealthServicer]) -> None:
    address, servicer = instance
    servicer.set("", State.SERVING)
    assert main(["health", address]) == 0


def test_one_that_loads_is_live_and_not_healthy(
    instance: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    address, servicer = instance
    servicer.set("", State.NOT_SERVING)
    assert main(["health", address]) == 1
    assert capsys.readouterr().err == f"{address}: NOT_SERVING\n"
    assert main(["health", "--live", address]) == 0


def test_a_gateway_without_instances_is_live_and_not_healthy(
    gateway: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, status = gateway
    monkeypatch.setenv("PACELINE_HEALTH", url)
    assert main(["health"]) == 0
    status[0] = 503
    assert main(["health"]) == 1
    assert "HTTP 503" in (said := capsys.readouterr().err) and "no decode instance" in said
    assert main(["health", "--live"]) == 0


def test_nobody_there_is_neither(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    for target in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/health"):
        for more in ([], ["--live"]):
            assert main(["health", "--timeout", "1", *more, target]) == 1
            assert target in capsys.readouterr().err


@pytest.mark.parametrize("command", [["health"], ["status", "--registry"], ["resume", "--address"]])
@pytest.mark.parametrize("ours", ["none", "others"])
def test_other_secrets_are_said_by_every_command(
    ours: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', make(tmp_path / 'theirs'))}"
    server.start()
    mine = ["--secrets", str(make(tmp_path / "ours").folder)] if ours == "others" else []
    try:
        code: object = main([*command, address, *mine])
    except SystemExit as ended:
        code = ended.code
    server.stop(None)
    said = f"{code}{capsys.readouterr().err}"
    assert "no answer; do both sides have the same --secrets?" in said and address in said


def test_a_gateway_asked_like_an_instance_is_said_to_speak_http(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert main(["health", f"127.0.0.1:{port}"]) == 1
        listener.shutdown(socket.SHUT_RDWR)
    assert f"a gateway is asked by http://127.0.0.1:{port}/health" in capsys.readouterr().err
