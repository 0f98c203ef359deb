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
    """How an instance spreads its KV. `shards[i].rank == i`.

    Layers may differ: in their bytes (unlike heads or dims; a single-buffer cache is one head), and in how far back
    a token looks. A layer with a window of W hands over only what the first token after the prompt still sees, the
    last W - 1 positions.
    """

    shards: tuple[Shard, ...]
    page_size: int  # token positions in a page
    bytes_per_token: tuple[int, ...]  # per layer: all its buffers, K and V together, all heads
    windows: tuple[int, ...]  # per layer: how many last positions a token sees, itself included; 0: all

    @classmethod
    def uniform(cls, shards: tuple[Shard, ...], page_size: int, bytes_per_token: int) -> Topology:
        """All layers alike, and every token sees all before it."""
        layers = min(MAX_EXTENT, max((shard.layers[1] for shard in shards), default=0))
        return cls(shards, page_size, (bytes_per_token,) * layers, (0,) * layers)

    def __post_init__(self) -> None:
        if not 1 <= len(self.shards) <= MAX_RANKS:
            raise PlanError(f"a topology has 1 to {MAX_RANKS} shards, not {len(self.shards)}")
        if not 1 <= self.page_size <= MAX_EXTENT:
            raise PlanError(f"impossible page of {self.page_size} positions")
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
        for what, values in (("bytes per token", self.bytes_per_token), ("windows", self.windows)):
            if len(values) != self.layer_count:
                raise PlanError(f"{what} of {len(values)} layers, shards of {self.layer_count}")
        for nbytes in self.bytes_per_token:
            if not 1 <= nbytes <= 1 << 30 or nbytes % self.head_count:
                raise PlanError(f"{nbytes} bytes per token do not divide into {self.head_count} heads")
        if not all(0 <= window <= 1 << 40 for window in self.windows):
            raise PlanError("a window is a number of positions")

    @property
    def layer_count(self) -> int:
        return max(shard.layers[1] for shard in self.shards)

    @property
    def head_count(self) -> int:
        return max(shard.heads[1] for shard in self.shards)

    def first(self, layer: int, tokens: int) -> int:
        """The first position of a prompt that this layer hands over."""
        window = self.windows[layer]
        return max(0, tokens - window + 1) if window else 0


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
            ("windows", source.windows, destination.windows),
        ):
            if mine != theirs:
                raise PlanError(f"{what}: {_shown(mine)} at the source, {_shown(theirs)} at the destination")
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

    def positions(self, flow: Target, tokens: int) -> int:
        """How many positions a prompt of `tokens` hands over on this flow, counted in each layer."""
        return sum(tokens - self.source.first(layer, tokens) for layer in range(*flow.layers))

    def bytes(self, flow: Target, tokens: int) -> int:
        """What a prompt of `tokens` weighs on this flow."""
        source, heads = self.source, flow.heads[1] - flow.heads[0]
        of_layers = (
            (tokens - source.first(layer, tokens)) * source.bytes_per_token[layer] for layer in range(*flow.layers)
        )
        return sum(of_layers) * heads // source.head_count

    def _flows_from(self, shard: Shard) -> list[Target]:
        flows = []
        for other in self.destination.shards:
            layers, heads = overlap(shard.layers, other.layers), overlap(shard.heads, other.heads)
            if layers != (0, 0) and heads != (0, 0):
                flows.append(Target(other.rank, layers, heads))
            elif shard.rank == self.sampler and other.rank == 0:
                flows.append(Target(0, (0, 0), (0, 0)))
        return flows


def _shown(value: int | tuple[int, ...]) -> str:
    """A value for every layer, short if all are the same."""
    if isinstance(value, tuple) and len(set(value)) == 1:
        return str(value[0])
    return str(value)[:200]
