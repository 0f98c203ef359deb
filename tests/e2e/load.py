"""Clients that ask a cluster on and on, and what operators and tests ask its instances meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from paceline_proto.v1 import admin_pb2, admin_pb2_grpc
from tests.e2e.cluster import Cluster
from tests.e2e.prompts import prompts, reference
from tests.e2e.test_resume import TOKENS, stream

PATIENCE = 90.0


def until(what: str, probe: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """The first true value of `probe`."""
    deadline = time.monotonic() + patience
    while not (found := probe()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.05)
    return found


def told(address: str) -> admin_pb2.StatusResponse | None:
    """What the instance says of itself, None while nobody listens there."""
    with grpc.insecure_channel(address) as channel:
        try:
            return admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=5)
        except grpc.RpcError:
            return None


def addresses(cluster: Cluster, role: str) -> dict[str, str]:
    return {part["name"]: part["address"] for part in cluster.record["parts"] if part["role"] == role}


class Load:
    """Streams from several clients at once, one after the other each, every answer compared with the reference."""

    def __init__(self, cluster: Cluster, model: Path, clients: int, picked: tuple[int, ...]) -> None:
        self.done = 0
        self._cluster, self._picked = cluster, picked
        self._asked, self._wanted = prompts(model), reference(model, TOKENS)
        self._over, self._pool = threading.Event(), ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._client, client) for client in range(clients)]

    def __enter__(self) -> Load:
        self.wait_for(len(self._clients))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()  # raises what went wrong

    def wait_for(self, answers: int) -> None:
        """Until so many more have come, or a client has found something wrong."""
        wanted = self.done + answers
        until(f"{answers} answers", lambda: self.done >= wanted or self.broken)

    @property
    def broken(self) -> bool:
        return any(client.done() for client in self._clients)

    def _client(self, number: int) -> None:
        turn = number
        while not self._over.is_set():
            which = self._picked[turn % len(self._picked)]
            got = stream(self._cluster, self._asked[which])
            assert got == self._wanted[which], f"client {number}, prompt {which}: {got}"
            self.done += 1
            turn += 1
