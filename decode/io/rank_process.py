"""One rank of a decode instance: `python -m decode.io.rank_process`, its configuration on standard input."""

from __future__ import annotations

from typing import Any

import zmq

from decode.io.port import DecodePort
from decode.scheduler import DecodeReplica
from engine.runtime import Runtime
from pipeline.io.boot import run_rank
from pipeline.io.control import RankConfig
from pipeline.io.kv import transfer_parts
from security.secrets import load_if
from transfer.io.receiving_port import ReceivingPort


def make_port(config: RankConfig, stage: Any, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[DecodePort, str, str]:
    """The port, no link address (decode ranks dial), and the transfer backend."""
    secrets = load_if(config.secrets)
    parts = transfer_parts(config, stage.kv_pool, secrets)
    port = ReceivingPort(
        parts.identity, parts.topology, parts.regions, parts.engine, parts.terms, config.host, context=context,
        secrets=secrets,
    )  # fmt: skip
    return DecodePort(port, secrets), "", parts.engine.name


if __name__ == "__main__":
    run_rank(DecodeReplica, Runtime, make_port)
