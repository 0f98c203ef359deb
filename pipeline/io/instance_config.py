"""What an instance is told at start (`DaemonConfig`) and what its model's folder says (`ModelFacts`).

In: JSON and, from the role's entry point, facts about the model. Out: one `RankConfig` per rank and
epoch. Invariant: a config that got past `check` can be started; every refusal names the field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from pipeline.io.control import RankConfig
from pipeline.io.control_socket import Lock
from pipeline.io.hosts import Host
from pipeline.io.zap import make_keys

# TCP ports of a rank, from `ring_ports + 4 × rank` on, for what comes from other hosts.
_PORTS_PER_RANK = 4
_RELAY, _HIDDEN = 0, 1  # of ranks other than 0
_RETURNS, _STORE, _CONTROL = 0, 1, 2  # of rank 0 and its daemon


class ConfigError(ValueError):
    """The configuration cannot work; the message names the field and the value."""


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    instance: str  # unique in the cluster, stable over restarts
    model: str  # Hugging Face folder
    run_dir: str  # this instance's own folder: lock, epoch, sockets, dumps
    role: str = ""  # "prefill" or "decode"; set by the entry point
    rank_module: str = ""  # what a rank process runs; set by the entry point
    listen: str = "127.0.0.1:0"  # of the gRPC server; port 0 takes any free one
    advertise: str = ""  # host that others are told; "": the one of `listen`
    secrets: str = ""  # folder of the cluster's; "": none, and then it may listen on loopback only
    insecure: bool = False  # it may listen elsewhere without
    gateways: tuple[str, ...] = ()  # host:port of registries; a name means all of its addresses
    metrics: str = ""  # host:port of /metrics; "": none
    otlp: str = ""  # host:port of a collector of traces; "": none
    model_name: str = ""  # "": the folder's name
    pp_size: int = 1
    layers: str = ""  # layers per rank, "8,7,8,7"; "": balanced by cost
    dtype: str = "float32"  # of weights and KV
    batch_invariant: bool = False  # logits do not depend on the batch; in float32 they never do
    page_size: int = 16
    pages: int = 0  # of the KV pool; 0: as many as fit in kv_bytes
    kv_bytes: int = 1 << 30  # per rank
    host_bytes: int = 1 << 30  # per rank, for the KV of retracted requests
    chunk_size: int = 512  # tokens per prefill chunk
    max_batch_rows: int = 64
    async_depth: int = 1  # microbatches in flight beyond pp_size
    max_model_len: int = 0  # 0: the model's
    max_queue: int = 256  # attempts known at once; more are refused
    stream_buffer: int = 1024  # tokens kept for a reader that is behind; one that falls further is cut off
    request_timeout: float = 600.0  # seconds, for requests that set none
    transfer_backend: str = "auto"
    transfer_device: str = ""
    push: str = "layer"  # prefill sends KV after each layer of a chunk, or after the whole chunk: "chunk"
    checksum: str = "xxh3"  # of KV pages, or "none"
    ring_timeout: float = 8.0  # seconds of silence after which a rank counts as stuck
    tick_timeout: float = 60.0  # seconds for one microbatch, after which the instance counts as hung
    progress_timeout: float = 5.0  # the same, after which the health service says so
    stage_timeout: float = 30.0
    drain_timeout: float = 20.0  # seconds that open requests get to end after SIGTERM
    load_timeout: float = 600.0  # the same as ring_timeout, while ranks load
    first_epoch: int = 1  # lower bound of the epoch, for when run_dir does not outlive a restart
    group_size: int = 1  # hosts (pods) that the ranks are shared out to
    group_index: int = 0  # which of them this is; 0 leads
    leader: str = ""  # host:port of the leader's gRPC server; of members
    ring_ports: int = 7800  # between hosts, rank r listens on four TCP ports from ring_ports + 4 r on

    def check(self) -> None:
        """Raises `ConfigError`."""
        if self.role not in ("prefill", "decode"):
            raise ConfigError(f"role is {self.role!r}; it is prefill or decode")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", self.instance):
            raise ConfigError(f"instance {self.instance!r} is not 1 to 63 letters, digits, dots, dashes or underscores")
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", self.rank_module):
            raise ConfigError(f"rank_module {self.rank_module!r} is not the name of a module")
        for field, known in (("push", ("layer", "chunk")), ("checksum", ("xxh3", "none"))):
            if (value := getattr(self, field)) not in known:
                raise ConfigError(f"{field} is {value!r}; it is {' or '.join(known)}")
        for field in ("pp_size", "page_size", "chunk_size", "max_batch_rows", "max_queue",
                      "stream_buffer", "first_epoch"):  # fmt: skip
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be at least 1")
        for field in ("drain_timeout", "pages", "kv_bytes", "host_bytes", "async_depth", "max_model_len"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} is {getattr(self, field)}; it cannot be negative")
        if not 1 <= self.group_size <= self.pp_size:
            raise ConfigError(
                f"group_size is {self.group_size}; {self.pp_size} ranks can be on 1 to {self.pp_size} hosts"
            )
        if not 0 <= self.group_index < self.group_size:
            raise ConfigError(f"group_index is {self.group_index}, but the group has {self.group_size}, counted from 0")
        if self.group_index and not self.leader:
            raise ConfigError(f"leader is not set; member {self.group_index} must know where the leader (index 0) is")
        if not 1024 <= self.ring_ports <= 65536 - _PORTS_PER_RANK * self.pp_size:
            raise ConfigError(
                f"ring_ports is {self.ring_ports}; {_PORTS_PER_RANK} ports of each of {self.pp_size} ranks must lie "
                "between 1024 and 65535"
            )
        if not self.pages and not self.kv_bytes:
            raise ConfigError("pages and kv_bytes are both 0; one of them must say how large the KV pool is")
        for field in (
            "ring_timeout",
            "tick_timeout",
            "progress_timeout",
            "stage_timeout",
            "load_timeout",
            "request_timeout",
        ):
            if not 0.1 <= getattr(self, field) <= 86400:
                raise ConfigError(f"{field} is {getattr(self, field)} s; it must be between 0.1 and 86400")


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon needs to know of the model; read by the entry points, which may know the engine."""

    digest: str
    num_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_positions: int
    layer_ranges: tuple[tuple[int, int], ...]  # global layer ids [begin, end) by rank
    windows: tuple[int, ...]  # per layer: how many last positions a token sees, itself included; 0: all

    def max_model_len(self, config: DaemonConfig) -> int:
        """Raises `ConfigError` if the config asks for more than the model has."""
        if config.max_model_len > self.max_positions:
            raise ConfigError(f"max_model_len is {config.max_model_len}, but the model's limit is {self.max_positions}")
        return config.max_model_len or self.max_positions


def model_name(config: DaemonConfig) -> str:
    return config.model_name or Path(config.model).absolute().name


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What the ranks of one epoch are told, and where their daemon listens to them."""

    ranks: list[RankConfig]
    near: str  # control endpoint for the ranks of this host
    far: str  # for those of other hosts; "": there are none
    far_lock: Lock


def plan_epoch(config: DaemonConfig, facts: ModelFacts, hosts: Sequence[Host], epoch: int) -> EpochPlan:
    """`hosts` in rank order; rank 0's is this one. What both ends of a link have in common decides what it is."""
    last = config.pp_size - 1
    keys = make_keys(config.pp_size)
    daemon_public, daemon_secret = (key.decode() for key in zmq.curve_keypair())

    def endpoint(reader: int, writers: Sequence[int], name: str, offset: int) -> str:
        """Where `reader` listens to `writers`: within a host a socket file, else TCP."""
        host = hosts[reader]
        if all(hosts[writer] == host for writer in writers):
            return f"ipc://{host.sockets(epoch)}/{name}"
        at = f"[{host.address}]" if ":" in host.address else host.address
        return f"tcp://{at}:{config.ring_ports + _PORTS_PER_RANK * reader + offset}"

    def link(name: str, rank: int, offset: int) -> str:
        """The link from rank - 1 to `rank`."""
        return endpoint(rank, [rank - 1], f"{name}{rank}", offset) if 0 < rank <= last else ""

    everyone = range(config.pp_size)
    returns = endpoint(0, [last], "returns", _RETURNS)
    store = endpoint(0, everyone, "store", _STORE)
    near = endpoint(0, [0], "control", _CONTROL)
    control = [endpoint(0, [rank], "control", _CONTROL) for rank in everyone]
    ranks = [
        RankConfig(
            role=config.role,
            instance=config.instance,
            epoch=epoch,
            rank=rank,
            pp_size=config.pp_size,
            layer_begin=begin,
            layer_end=end,
            layer_ranges=tuple(facts.layer_ranges),
            windows=facts.windows,
            model=hosts[rank].model,
            model_digest=facts.digest,
            dtype=config.dtype,
            batch_invariant=config.batch_invariant,
            page_size=config.page_size,
            pages=config.pages,
            kv_bytes=config.kv_bytes,
            host_bytes=config.host_bytes,
            chunk_size=config.chunk_size,
            max_batch_rows=config.max_batch_rows,
            async_depth=config.async_depth,
            max_model_len=facts.max_model_len(config),
            vocab_size=facts.vocab_size,
            eos_ids=facts.eos_ids,
            max_queue=config.max_queue,
            transfer_backend=config.transfer_backend,
            transfer_device=config.transfer_device,
            push=config.push,
            checksum=config.checksum,
            host=hosts[rank].address,
            secrets=config.secrets,
            control=control[rank],
            control_key="" if control[rank] == near else daemon_public,
            relay_in=link("relay", rank, _RELAY),
            relay_out=link("relay", rank + 1, _RELAY),
            hidden_in=link("hidden", rank, _HIDDEN),
            hidden_out=link("hidden", rank + 1, _HIDDEN),
            returns=returns,
            store=store,
            keys=keys[rank],
            ring_timeout=config.ring_timeout,
            tick_timeout=config.tick_timeout,
            stage_timeout=config.stage_timeout,
            dump_dir=hosts[rank].dumps,
        )
        for rank, (begin, end) in enumerate(facts.layer_ranges)
    ]
    far = next((at for at in control if at != near), "")
    return EpochPlan(ranks, near, far, Lock(daemon_secret, keys[0].ranks))
