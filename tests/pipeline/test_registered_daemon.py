"""A real daemon (with scripted ranks) and a real registry: what it tells, a second of silence, and how it goes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.registry import Registry
from gateway.registry_server import RegistryServer
from paceline_proto.v1 import common_pb2
from tests.gateway.scripted_cluster import run, until
from tests.pipeline.daemon_harness import Daemon, request
from tests.pipeline.scripted_rank import HANG


def test_G3_a_daemon_registers_outlives_a_second_of_standing_still_drains_and_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def test() -> None:
        registry = Registry(GatewayConfig(model=tmp_path), None, highest_token_id=0)
        registry.start()
        server = RegistryServer(registry, lease_s=5.0, secrets=None)
        port = await server.start("127.0.0.1:0")
        daemon = Daemon(tmp_path, gateways=[f"127.0.0.1:{port}"], drain_timeout=30.0)
        try:
            await until(lambda: registry.fleet.prefills, within_s=25)
            told = registry.registered().instances[0].description
            assert (told.instance.instance_id, told.instance.epoch) == ("prefill-0", 1)
            assert told.role == common_pb2.ROLE_PREFILL and told.serving
            assert (told.model_digest, told.kv_dtype, told.page_size, told.pages) == ("d1", "float32", 16, 100)
            assert [(rank.layer_begin, rank.layer_end) for rank in told.ranks] == [(0, 2), (2, 4)]
            assert told.protocol_version and told.HasField("load")

            changed = asyncio.create_task(registry.change())
            daemon.process.send_signal(signal.SIGSTOP)
            registry.failed(registry.fleet.prefills[0], unreachable=False)  # a reason to ask it just now
            await asyncio.sleep(1.0)
            daemon.process.send_signal(signal.SIGCONT)
            await registry.ask_again(registry.fleet.prefills[0])
            assert not changed.done()
            status = await asyncio.to_thread(daemon.status)
            assert (status.restarts, status.instance.epoch) == (0, 1)

            os.kill(status.ranks[1].pid, signal.SIGKILL)
            await changed
            await until(lambda: registry.fleet.prefills, within_s=25)
            changed = asyncio.create_task(registry.change())

            call = daemon.generate(request([HANG], "open"))
            await asyncio.to_thread(next, call)
            daemon.process.send_signal(signal.SIGTERM)
            await changed
            assert registry.fleet.prefills == ()
            [known] = registry.describe()
            assert "is draining: received SIGTERM" in str(known["status"]), "it drains, and is still known"
            await asyncio.to_thread(daemon.abort, "open")
            assert await asyncio.to_thread(daemon.wait) == 0
            assert registry.describe() == []
        finally:
            daemon.close()
            await registry.close()
            await server.stop()

    run(test)
    said = [record.getMessage() for record in caplog.records if "prefill-0" in record.getMessage()]
    assert any("is restarting after: rank 1 was killed" in line for line in said), (
        "the reason comes with the first word"
    )
    assert any("has left: prefill-0 is stopping: received SIGTERM" in line for line in said)
