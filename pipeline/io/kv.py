"""Where this rank's KV lies, in the words of `transfer`. Geometry only.

In: the rank's configuration and the stage's pool. Out: the instance's topology, this rank's region
table, its transfer engine with the pool registered, how to make another such engine, and the terms a
peer must agree with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.io.control import RankConfig
from security.secrets import Secrets
from transfer.actions import Peer
from transfer.io.engine import TransferEngine, make_engine
from transfer.io.engine_slot import EngineFactory
from transfer.messages import Terms
from transfer.plan import Shard, Topology
from transfer.regions import RegionTable


class Region(Protocol):
    """`engine.kv_pool.Region`."""

    @property
    def layer(self) -> int: ...
    @property
    def address(self) -> int: ...


class Pool(Protocol):
    """`engine.kv_pool.KVPool`; `bytes_per_token` is of one layer's K or V."""

    pages: int
    page_size: int
    kv_heads: int
    bytes_per_token: int
    nbytes: int
    descriptor: int | None  # of the shared memory file that it is a mapping of

    @property
    def base_address(self) -> int: ...
    def regions(self) -> Sequence[Region]: ...


@dataclass(frozen=True, slots=True)
class TransferParts:
    """What a sending or receiving port is made of."""

    identity: Peer
    topology: Topology
    regions: RegionTable
    engine: TransferEngine
    engine_factory: EngineFactory  # for a sender: its engine is replaced once a write's fate stays unknown
    terms: Terms


def transfer_parts(config: RankConfig, pool: Pool, secrets: Secrets | None) -> TransferParts:
    """Starts the transfer engine and registers the pool. Raises `EngineError` with what is missing."""
    heads = (0, pool.kv_heads)
    shards = tuple(Shard(rank, layers, heads) for rank, layers in enumerate(config.layer_ranges))
    bases: dict[int, list[int]] = {}
    for region in pool.regions():  # layers ascending, K before V
        bases.setdefault(region.layer, []).append(region.address)
    regions = RegionTable(
        layers=(config.layer_begin, config.layer_end),
        heads=heads,
        tokens=pool.pages * pool.page_size,
        bytes_per_token=(pool.bytes_per_token,) * (config.layer_end - config.layer_begin),
        bases=tuple(tuple(pair) for pair in bases.values()),
    )

    key = secrets.derive("transfer") if secrets is not None else None

    def engine_factory() -> TransferEngine:
        engine = make_engine(config.transfer_backend, config.host, config.transfer_device, key=key)
        try:
            engine.register(pool.base_address, pool.nbytes, pool.descriptor)
        except BaseException:
            engine.close()
            raise
        return engine

    engine = engine_factory()
    return TransferParts(
        identity=Peer(config.instance, config.epoch, config.rank),
        topology=Topology(shards, pool.page_size, (2 * pool.bytes_per_token,) * len(config.windows), config.windows),
        regions=regions,
        engine=engine,
        engine_factory=engine_factory,
        terms=Terms(
            model=config.model_digest,
            kv_dtype=config.dtype,
            cache="kv",
            backend=engine.name,
            checksum=config.checksum,
        ),
    )
