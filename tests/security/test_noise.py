"""What strangers send is counted, and takes one line of the log however much it is."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from security.noise import count_noise
from tests.gateway.scripted_cluster import cluster, run
from tests.gateway.scripted_instances import decode_saying, prefill_saying


def test_nonsense_is_told_once_and_everything_else_always(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tests.noise")
    noise = count_noise(logger, "malformed greetings", (UnicodeDecodeError,))
    for error in (b"\xff", b"\xfe", b"\xfd"):
        try:
            error.decode()
        except UnicodeDecodeError:
            logger.exception("a peer sent %r", error)
    logger.error("something else")
    assert noise.count == 3
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "malformed greetings: refused (UnicodeDecodeError); further ones are only counted",
        "something else",
    ]


def test_malformed_http_does_not_fill_the_gateways_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from engine.smollm2 import ensure_default_model

    async def test() -> None:
        async with cluster(ensure_default_model(), prefill_saying(5), decode_saying([5, 2])) as c:
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
                writer.write(b"GET / HTTP/1.1\r\nno header\nWARNING all is lost\r\n\r\n")
                assert (await reader.readline()).split()[1] == b"400"
                writer.close()
            assert b'paceline_gateway_refused_total{why="malformed"} 20.0' in c.server.gateway.metrics.render(
                c.server.gateway.registry.fleet
            )

    run(test)
    assert "all is lost" not in caplog.text
    assert sum("malformed HTTP" in record.getMessage() for record in caplog.records) == 1
