"""Who sends which layers to whom.

In: the topologies of a prefill (source) and a decode (destination) instance.
Out: for each source rank its targets, for each destination rank its sources.
Invariants: every (layer, head) is sent exactly once; ids are global, nothing is
positional; the sampler (the last source rank) always feeds destination rank 0,
with an empty layer range if they share no layer, because the first token travels
in its `Finished`. A topology that does not tile its layers and heads exactly is a
`PlanError`: it may come from the wire, so it is refused and never asserted.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 256
MAX_EXTENT = 1 << 16  # layers, heads, positions per page: far above anything real, small enough to multiply


class PlanError(ValueError):
    """Two topologies that cannot exchange KV, or one that is not a topology."""


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The common part of two half-open ranges; (0, 0) if there is none."""
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, end) if begin < end else (0, 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds: layers and KV heads, both half-open, global ids."""

    rank: int
    layers: tuple[int, int]
    heads: tuple[int, int]

    @property
    def area(self) -> int:
        return (self.layers[1] - self.layers[0]) * (self.heads[1] - self.heads[0])


@dataclass(frozen=True, slots=True)
class Topology:
    """How an instance spreads its KV. `shards[i].rank == i`."""

    shards: tuple[Shard, ...]
    page_size: int  # token positions in a page
    bytes_per_token: int  # of one layer: K and V together, all heads

    def __post_init__(self) -> None:
        if not 1 <= len(self.shards) <= MAX_RANKS:
            raise PlanError(f"a topology has 1 to {MAX_RANKS} shards, not {len(self.shards)}")
        if not 1 <= self.page_size <= MAX_EXTENT or not 1 <= self.bytes_per_token <= 1 << 30:
            raise PlanError(f"impossible page: {self.page_size} positions of {self.bytes_per_token} bytes")
        for index, shard in enumerate(self.shards):
            if shard.rank != index:
                raise PlanError(f"shard {index} says it is rank {shard.rank}")
            for begin, end in (shard.layers, shard.heads):
                if not 0 <= begin < end <= MAX_EXTENT:
                    raise PlanError(f"rank {index} holds an impossible range [{begin}, {end})")
            for other in self.shards[:index]:
                if overlap(shard.layers, other.layers) != (0, 0) and overlap(shard.heads, other.heads) != (0, 0):
                    raise PlanError(f"ranks {other.rank} and {index} hold the same (layer, head)")
        if sum(shard.area for shard in self.shards) != self.layer_count * self.head_count:
            raise PlanError("the shards leave some (layer, head) without a rank")
        if self.bytes_per_token % self.head_count:
            raise PlanError(f"{self.bytes_per_token} bytes do not divide into {self.head_count} heads")

    @property
    def layer_count(self) -> int:
        return max(shard.layers[1] for shard in self.shards)

    @property
    def head_count(self) -> int:
        return max(shard.heads[1] for shard in self.shards)

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Target:
    """The other end of one flow: its rank, and the layers and heads that go there."""

    rank: int
    layers: tuple[int, int]
    heads: tuple[int, int]

    @property
    def layer_count(self) -> int:
        return self.layers[1] - self.layers[0]


class TransferPlan:
    """Computed once per pair of instances."""

    def __init__(self, source: Topology, destination: Topology) -> None:
        for what, mine, theirs in (
            ("layers", source.layer_count, destination.layer_count),
            ("KV heads", source.head_count, destination.head_count),
            ("page size", source.page_size, destination.page_size),
            ("bytes per token and layer", source.bytes_per_token, destination.bytes_per_token),
        ):
            if mine != theirs:
                raise PlanError(f"{what}: {mine} at the source, {theirs} at the destination")
        self.source = source
        self.destination = destination
        self._targets = tuple(tuple(self._flows_from(shard)) for shard in source.shards)

    @property
    def sampler(self) -> int:
        return len(self.source.shards) - 1

    def targets(self, source_rank: int) -> tuple[Target, ...]:
        """Destination ranks this source rank must reach, in rank order."""
        return self._targets[source_rank]

    def sources(self, destination_rank: int) -> tuple[Target, ...]:
        """Source ranks this destination rank must hear from, in rank order."""
        return tuple(
            Target(source_rank, target.layers, target.heads)
            for source_rank, targets in enumerate(self._targets)
            for target in targets
            if target.rank == destination_rank
        )

    def bytes(self, flow: Target, tokens: int) -> int:
        """What `tokens` positions weigh on this flow."""
        heads = flow.heads[1] - flow.heads[0]
        return tokens * flow.layer_count * heads * (self.source.bytes_per_token // self.source.head_count)

    def _flows_from(self, shard: Shard) -> list[Target]:
        flows = []
        for other in self.destination.shards:
            layers, heads = overlap(shard.layers, other.layers), overlap(shard.heads, other.heads)
            if layers != (0, 0) and heads != (0, 0):
                flows.append(Target(other.rank, layers, heads))
            elif shard.rank == self.sampler and other.rank == 0:
                flows.append(Target(0, (0, 0), (0, 0)))
        return flows
