"""What strangers may cost the gateway: connections and bodies are bounded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from gateway.app import listening
from gateway.config import GatewayConfig
from gateway.http_limits import Door, body_deadline
from gateway.http_shell import openai_errors
from security.exposure import Exposed
from tests.gateway.scripted_cluster import cluster, run
from tests.gateway.scripted_instances import decode_saying, prefill_saying


async def answer(port: int, text: bytes) -> tuple[asyncio.StreamWriter, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    try:
        return writer, await reader.readuntil(b"\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return writer, b""


def test_connections_beyond_the_limit_are_closed_at_once(model_folder: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefill_saying(5), decode_saying([5, 2]), max_connections=8) as c:
            held = [await asyncio.open_connection("127.0.0.1", c.server.port) for _ in range(8)]
            writer, said = await answer(c.server.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert said == b""
            writer.close()
            for _, one in held:
                one.close()
            async with asyncio.timeout(10):
                while not said:
                    writer, said = await answer(c.server.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    writer.close()
            assert said.startswith(b"HTTP/1.1 200")

    run(test)


def test_a_body_that_trickles_in_ends_with_an_error_of_our_shape() -> None:
    async def echo(http: web.Request) -> web.Response:
        return web.Response(body=await http.read())

    async def test() -> None:
        application = web.Application(middlewares=[openai_errors, body_deadline(0.05)])
        application.add_routes([web.post("/echo", echo)])
        runner = web.AppRunner(application, lingering_time=0.05)
        await runner.setup()
        assert runner.server is not None
        listener = await asyncio.get_running_loop().create_server(Door(runner.server, 9), "127.0.0.1", 0)
        try:
            port = listener.sockets[0].getsockname()[1]
            head = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 4\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"half")
            assert (await reader.read()).endswith(b"half")
            reader, slow = await asyncio.open_connection("127.0.0.1", port)
            slow.write(head + b"ha")
            status, _, rest = (await reader.read()).partition(b"\r\n")
            assert status == b"HTTP/1.1 408 Request Timeout"
            assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
            writer.close()
            slow.close()
        finally:
            listener.close()
            await runner.cleanup()

    run(test)


def test_off_loopback_the_gateway_needs_keys_or_insistence(model_folder: Path) -> None:
    async def test() -> None:
        with pytest.raises(Exposed, match=r"the gateway would listen on 0.0.0.0.*--api-keys FILE.*--insecure"):
            async with listening(GatewayConfig(model_folder, host="0.0.0.0", port=0)):
                pass
        async with listening(GatewayConfig(model_folder, host="0.0.0.0", port=0, insecure=True)) as server:
            assert server.port

    run(test)
