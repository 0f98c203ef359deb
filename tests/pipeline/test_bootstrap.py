"""How a decode rank asks prefill instances what they are."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from decode.io.bootstrap import Bootstrap, Found, Unreachable
from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2


class Instance(bootstrap_pb2_grpc.BootstrapServicer):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def Describe(self, request: bootstrap_pb2.DescribeRequest, context: Any) -> bootstrap_pb2.DescribeResponse:
        there = common_pb2.InstanceRef(instance_id="p", epoch=self.epoch)
        return bootstrap_pb2.DescribeResponse(instance=there, serving=True)


@contextmanager
def instance(epoch: int) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    bootstrap_pb2_grpc.add_BootstrapServicer_to_server(Instance(epoch), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def mute() -> Iterator[str]:
    """It takes connections and says nothing, as a host behind a link that was cut."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def next_answers(bootstrap: Bootstrap, seconds: float = 5.0) -> list[Found | Unreachable]:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        select.select([bootstrap.fd], [], [], left)
        if answers := bootstrap.answers():
            return answers
    return []


def test_an_instance_that_moved_is_asked_at_its_new_address_at_once() -> None:
    bootstrap = Bootstrap()
    with mute() as old, instance(epoch=2) as new:
        bootstrap.ask("p", old, 0)
        bootstrap.ask("p", new, 0)
        (answer,) = next_answers(bootstrap)
        assert isinstance(answer, Found) and answer.description.instance.epoch == 2
        assert next_answers(bootstrap, 0.2) == [], "the old address was heard"
        assert bootstrap.asking == 0
    bootstrap.close()


def test_only_the_last_question_counts_also_back_at_the_first_address() -> None:
    bootstrap = Bootstrap()
    with mute() as other, instance(epoch=1) as address:
        bootstrap.ask("p", other, 0)
        bootstrap.ask("p", address, 0)
        bootstrap.ask("p", other, 0)
        bootstrap.ask("p", address, 0)
        (answer,) = next_answers(bootstrap)
        assert isinstance(answer, Found)
        assert next_answers(bootstrap, 0.2) == [] and bootstrap.asking == 0
        bootstrap.ask("p", address, 7)
        (answer,) = next_answers(bootstrap)
        assert isinstance(answer, Unreachable) and "epoch 7" in answer.reason
    bootstrap.close()
