"""Birth of a rank process: from its configuration to a running control loop.

In: a `RankConfig` on standard input, and the role's own parts (replica, port, runtime), handed in.
Out: an exit code. The start-up conversation with the daemon is described in `pipeline.io.control`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq

from pipeline.io import control
from pipeline.io.control import RankConfig
from pipeline.io.driver import Driver, Port
from pipeline.io.executor import Executor, Sampler
from pipeline.io.hidden import HiddenReceiver, HiddenSender
from pipeline.io.host_memory import HostMemory
from pipeline.io.links import Links
from pipeline.rank import RankCore
from pipeline.replica import Replica, ReplicaConfig
from transfer.io.engine import choose

START_TIMEOUT = 600.0  # seconds a rank waits for the daemon between the steps of the start-up
HIDDEN_TIMEOUT = 120.0  # seconds for a neighbour's forward; the ring notices a dead neighbour much earlier


class Runtime(Protocol):
    """`engine.runtime.Runtime`."""

    @property
    def sample(self) -> Sampler: ...
    def capacity(self, budget: int) -> int: ...
    def load(self, pages: int, progress: Callable[[float, str], None], shared: bool) -> Any: ...


MakePort = Callable[[RankConfig, Any, "zmq.Context[zmq.Socket[bytes]]"], tuple[Port, str, str]]


class Daemon:
    """The rank's end of the control channel during start-up."""

    def __init__(self, config: RankConfig) -> None:
        # A context of its own, so that its end waits for this channel's last words and for nothing else.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, str(config.rank).encode())
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.SNDHWM, control.HIGH_WATER)
        if config.control_key:
            config.keys.dial_key(self.socket, config.control_key)
        self.socket.connect(config.control)

    def say(self, message: control.ToDaemon) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        self.socket.close()
        self._context.term()

    def wait(self, kind: type[control.Configure] | type[control.Go]) -> Any:
        """The next message, which must be a `kind`. Raises `TimeoutError`, or `SystemExit` on `Quit`."""
        if not self.socket.poll(int(START_TIMEOUT * 1000)):
            raise TimeoutError(f"the daemon did not say {kind.__name__} for {START_TIMEOUT:g} s")
        message = msgspec.msgpack.decode(self.socket.recv(), type=control.ToRank)
        if isinstance(message, control.Quit):
            raise SystemExit(0)
        if not isinstance(message, kind):
            raise ValueError(f"expected {kind.__name__} from the daemon, got {type(message).__name__}")
        return message


def run_rank(
    replica: Callable[[ReplicaConfig], Replica],
    runtime: Callable[[str, range, int, str, bool], Runtime],
    make_port: MakePort,
) -> None:
    """The main function of a rank process; never returns.

    `make_port` gets the configuration, the loaded stage and the ZMQ context, and gives the port, its
    link address and the name of the transfer backend it chose.
    """
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=RankConfig)
    logging.basicConfig(level=os.environ.get("PACELINE_LOG", "INFO"), format="%(levelname)s %(name)s: %(message)s")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    daemon = Daemon(config)
    try:
        code = _live(config, replica, runtime, make_port, context, daemon)
    except SystemExit:
        code = 0
    except Exception as error:
        logging.exception("rank %d could not start", config.rank)
        daemon.say(control.Failing(f"{type(error).__name__}: {error}"))
        code = 1
    daemon.close()
    # Transfer libraries crash in their exit handlers; everything that matters is flushed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _live(
    config: RankConfig,
    replica: Callable[[ReplicaConfig], Replica],
    runtime: Callable[[str, range, int, str, bool], Runtime],
    make_port: MakePort,
    context: zmq.Context[zmq.Socket[bytes]],
    daemon: Daemon,
) -> int:
    layers = range(config.layer_begin, config.layer_end)
    model = runtime(config.model, layers, config.page_size, config.dtype, config.batch_invariant)
    daemon.say(control.Capacity(config.pages or model.capacity(config.kv_bytes)))
    pages = daemon.wait(control.Configure).pages
    # The stream engine lets peers on this host copy into the pool themselves.
    shared = choose(config.transfer_backend, config.transfer_device).backend == "stream"
    stage = model.load(pages, lambda fraction, text: daemon.say(control.Loading(fraction, text)), shared)
    port, link_address, backend = make_port(config, stage, context)
    links = Links(config)
    executor = _executor(config, stage, model.sample, links)
    core = RankCore(config.rank, config.pp_size, replica(_replica_config(config, pages)))
    daemon.say(control.Ready(link_address, backend))
    daemon.wait(control.Go)
    code = Driver(config, core, links, executor, port, daemon.socket).run()
    executor.stop(1.0)
    port.close()
    return code


def _executor(config: RankConfig, stage: Any, sample: Sampler, links: Links) -> Executor:
    rank, epoch, keys = config.rank, config.epoch, config.keys
    hidden_in, hidden_out = None, None
    # In the context of the links, whose gatekeeper knows the ranks' keys.
    if rank > 0:
        most_tokens = config.chunk_size + config.max_batch_rows
        hidden_in = HiddenReceiver(links.context, config.hidden_in, epoch, keys, rank - 1, most_tokens)
    if rank < config.pp_size - 1:
        hidden_out = HiddenSender(links.context, config.hidden_out, epoch, keys, rank + 1)
    host = HostMemory(stage.kv_pool, config.host_bytes)
    by_layer = config.role == "prefill" and config.push == "layer"
    return Executor(stage, sample, hidden_in, hidden_out, host, HIDDEN_TIMEOUT, by_layer)


def _replica_config(config: RankConfig, pages: int) -> ReplicaConfig:
    return ReplicaConfig(
        epoch=config.epoch,
        pp_size=config.pp_size,
        pages=pages,
        page_size=config.page_size,
        chunk_size=config.chunk_size,
        max_batch_rows=config.max_batch_rows,
        async_depth=config.async_depth,
        max_model_len=config.max_model_len,
        eos_ids=config.eos_ids,
        stage_timeout=int(config.stage_timeout * 1e6),
        max_requests=config.max_queue,
    )
