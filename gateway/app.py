"""Starts and stops the gateway.

In: a `GatewayConfig`, or a command line. Out: a listening HTTP server, one "ready" line in the
log, and on SIGTERM or SIGINT an orderly end: no new requests, a grace for those in flight, then
one clean error for what is left.

    python -m gateway.app --model FOLDER --prefill HOST:PORT --decode HOST:PORT
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from gateway.api_keys import KeyRing
from gateway.config import GatewayConfig
from gateway.http_limits import IDLE_S, LINGER_S, Door
from gateway.key_limits import KeyLimits
from gateway.model_files import ModelFiles
from gateway.routes import make_application
from gateway.service import Gateway
from security.exposure import check_cluster_port, check_public_port
from security.noise import count_noise

log = logging.getLogger("paceline.gateway")

REFUSED = 2


@dataclass(frozen=True, slots=True)
class Listening:
    gateway: Gateway
    keys: KeyRing | None
    host: str
    port: int  # the real one, also where the configuration says 0


@asynccontextmanager
async def listening(config: GatewayConfig) -> AsyncIterator[Listening]:
    """The gateway serves inside this block; leaving it is the orderly end."""
    check_public_port("the gateway", config.host, bool(config.api_keys), config.insecure)
    if config.registry:
        host = config.registry.rpartition(":")[0]
        check_cluster_port("the registry of the gateway", host, bool(config.secrets), config.insecure)
    limits = KeyLimits(config.key_requests_per_s, config.key_inflight)
    gateway = Gateway(config, ModelFiles(config.model))

    def refused(why: str) -> None:
        gateway.metrics.refused.labels(why).inc()

    keys = KeyRing(Path(config.api_keys), limits, refused) if config.api_keys else None
    count_noise(server_logger, "malformed HTTP", (HttpProcessingError,), lambda: refused("malformed"))
    # A client that goes away cancels its handler, streaming or not.
    runner = web.AppRunner(
        make_application(gateway, keys), handler_cancellation=True, access_log=None, shutdown_timeout=1.0,
        keepalive_timeout=IDLE_S, lingering_time=LINGER_S,
    )  # fmt: skip
    async with gateway.running():
        await runner.setup()
        try:
            assert runner.server is not None
            door = Door(runner.server, config.max_connections, refused)
            listener = await asyncio.get_running_loop().create_server(door, config.host, config.port, backlog=1024)
            yield Listening(gateway, keys, config.host, listener.sockets[0].getsockname()[1])
            listener.close()
            await gateway.drain()
        finally:
            await runner.cleanup()


async def serve(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with listening(config) as server:
        if server.keys is not None:
            loop.add_signal_handler(signal.SIGHUP, server.keys.reload)
        log.info(
            "gateway ready on http://%s:%d (model %s; registry %s; prefill %s; decode %s)",
            server.host,
            server.port,
            config.served_name,
            f"{config.registry.rpartition(':')[0]}:{server.gateway.registry_port}" if config.registry else "none",
            ", ".join(config.prefill) or "none",
            ", ".join(config.decode) or "none",
        )
        await stop.wait()
        log.info("gateway stopping, %d requests in flight", server.gateway.in_flight)
    log.info("gateway stopped")


def parse_arguments(arguments: Sequence[str]) -> GatewayConfig:
    """Every field of the configuration is an option; `prefill` and `decode` may be repeated."""
    parser = argparse.ArgumentParser(prog="python -m gateway.app", description="OpenAI-compatible HTTP front.")
    parser.add_argument("--model", type=Path, required=True, help="folder with the model's tokenizer and config")
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}", action="append", default=[], metavar="HOST:PORT")
    for field in dataclasses.fields(GatewayConfig):
        if field.name not in ("model", "prefill", "decode"):
            kind = type(field.default)
            how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "default": field.default}
            parser.add_argument(f"--{field.name.replace('_', '-')}", **how)
    values = vars(parser.parse_args(arguments))
    return GatewayConfig(**values | {"prefill": tuple(values["prefill"]), "decode": tuple(values["decode"])})


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        config = parse_arguments(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"gateway: {error}")
    try:
        asyncio.run(serve(config))
    except (OSError, ValueError) as error:
        # An address it cannot listen on; Exposed, KeysError and SecretsError are ValueErrors.
        log.error("refused to start: %s", error)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
