"""The process of one instance: gRPC outside, rank processes inside; or of one member of its group.

In: a `DaemonConfig` (JSON on standard input or in a file) and a reader of model facts, given by the
role's entry point. Out: an exit code: 0 stopped on request, 1 gave up, 2 refused at start; the
reason is on standard error. Invariant: whatever ends the daemon, no rank outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from pipeline.io.address import advertised_host, join_host_port, numeric_host, split_host_port
from pipeline.io.attempt_metrics import AttemptMetrics
from pipeline.io.group.leader import Group
from pipeline.io.group.member import attend
from pipeline.io.group.terms import terms_of
from pipeline.io.hosts import OneHost, this_host
from pipeline.io.instance_config import ConfigError, DaemonConfig, ModelFacts
from pipeline.io.metrics_server import MetricsServer
from pipeline.io.observers import Observers
from pipeline.io.registration import Registration
from pipeline.io.run_folder import RunFolder, RunFolderError
from pipeline.io.service import Server
from pipeline.io.supervisor import Supervisor
from security.exposure import check_cluster_port
from security.secrets import load_if
from telemetry.otlp import make_tracer

__all__ = ["ConfigError", "DaemonConfig", "ModelFacts", "main", "serve"]

log = logging.getLogger("paceline.daemon")

REFUSED = 2
_STREAMS_GRACE_S = 1.0


def main(role: str, rank_module: str, read_facts: Callable[[str, str, int], Any]) -> int:
    """Entry point of both roles: `python -m <role>.io.daemon [CONFIG.json]`; without a path, reads standard input.

    `read_facts(model folder, layer split, ranks)` gives an object with the fields of `ModelFacts`.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"
    )
    try:
        text = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else sys.stdin.buffer.read()
        config = msgspec.json.decode(text, type=DaemonConfig)
        config = msgspec.structs.replace(
            config, role=config.role or role, rank_module=config.rank_module or rank_module
        )
        if config.role != role:
            raise ConfigError(f"role is {config.role!r}, but this is the {role} daemon")
        config.check()
        read = read_facts(config.model, config.layers, config.pp_size)
        facts = msgspec.convert(read, ModelFacts, from_attributes=True)
        if len(facts.layer_ranges) != config.pp_size:
            raise ConfigError(f"layers give {len(facts.layer_ranges)} ranks, but pp_size is {config.pp_size}")
        return asyncio.run(attend(config, facts) if config.group_index else serve(config, facts))
    except (OSError, ValueError, RunFolderError) as error:
        # What `serve` raises, and the errors of JSON and of the model folder: all but RunFolderError are ValueErrors.
        log.error("refused to start: %s", error)
        return REFUSED


async def serve(config: DaemonConfig, facts: ModelFacts) -> int:
    """Runs the instance until it is told to stop (0) or gives up (1).

    Raises `ConfigError`, `BadAddress`, `Exposed`, `SecretsError`, `NoSdk` or `RunFolderError` if it cannot start.
    """
    max_model_len = facts.max_model_len(config)
    host = advertised_host(config.listen, config.advertise)
    listen_host, port = split_host_port(config.listen)
    secrets = load_if(config.secrets)
    check_cluster_port(f"the {config.role} instance", listen_host, secrets is not None, config.insecure)
    folder = RunFolder(config.run_dir)
    folder.take()
    try:
        own = OneHost(this_host(host, folder.path, config.model), config.pp_size, config.rank_module, folder.lock_fd)
        group = _group(config, facts, host, folder, own) if config.group_size > 1 else None
        supervisor = Supervisor(config, facts, group or own, folder)
        registry = CollectorRegistry()
        tracer = make_tracer(config.otlp, f"paceline-{config.role}", config.instance)
        observers = Observers(config.role, AttemptMetrics(registry), tracer)
        server = Server(supervisor, max_model_len, secrets, observers, group)
        registration = Registration(config.gateways, server.instance.describe, secrets)
        server.on_change = registration.nudge
        metrics = MetricsServer(registry, supervisor)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.stop, f"received {number.name}")
        port = await server.start(join_host_port(listen_host, port))
        server.instance.address = join_host_port(host, port)
        supervisor.on_ready = lambda: _log_ready(supervisor, server.instance.address)
        log.info("[%s] %s instance at %s, loading %s on %d ranks", config.instance, config.role,
                 server.instance.address, config.model, config.pp_size)  # fmt: skip
        registration.start()
        try:
            if config.metrics:
                log.info("[%s] metrics at %s", config.instance, await metrics.start(config.metrics))
            return await supervisor.run()
        finally:
            await registration.leave(supervisor.not_serving_reason())
            await server.stop(_STREAMS_GRACE_S)
            await metrics.stop()
            tracer.close()
    finally:
        folder.release()


def _group(config: DaemonConfig, facts: ModelFacts, host: str, folder: RunFolder, own: OneHost) -> Group:
    # Sockets listen at an address, not at a name.
    here = this_host(numeric_host(host), folder.path, config.model)
    return Group(terms_of(config, facts), here, config.ring_timeout, folder.last_epoch(), own)


def _log_ready(supervisor: Supervisor, address: str) -> None:
    config, current = supervisor.config, supervisor.incarnation
    assert current is not None
    log.info(
        "[%s] ready: %s, epoch %d, at %s, %d ranks, %d pages of %d, transfer by %s", config.instance, config.role,
        supervisor.epoch, address, config.pp_size, current.pages, config.page_size, current.backend,
    )  # fmt: skip
