"""One rank of a prefill instance: `python -m prefill.io.rank_process`, its configuration on standard input."""

from __future__ import annotations

from typing import Any

import zmq

from engine.runtime import Runtime
from pipeline.io.boot import run_rank
from pipeline.io.control import RankConfig
from pipeline.io.kv import transfer_parts
from prefill.io.port import PrefillPort
from prefill.scheduler import PrefillReplica
from security.secrets import load_if
from transfer.io.sending_port import SendingPort


def make_port(config: RankConfig, stage: Any, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[PrefillPort, str, str]:
    """The port, the address its link listens on, and the transfer backend."""
    secrets = load_if(config.secrets)
    parts = transfer_parts(config, stage.kv_pool, secrets)
    port = SendingPort(
        parts.identity,
        parts.topology,
        parts.regions,
        parts.engine,
        parts.terms,
        config.host,
        engine_factory=parts.engine_factory,
        secrets=secrets,
    )
    return PrefillPort(port, config.rank == config.pp_size - 1), port.address, parts.engine.name


if __name__ == "__main__":
    run_rank(PrefillReplica, Runtime, make_port)
