"""One decoder layer, generic over the supported families.

In: hidden states `[T, hidden]` of a packed batch. Out: the same shape, with the layer's K and V of
the batch written to the pool on the way.

Invariant: every part keeps the bits of a token whatever else is in the batch, so the layer does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention import PackedBatch, attend
from engine.layout import Layout, Window
from engine.linear import Linear
from engine.moe import SparseMlp
from engine.steps import Rotation, gate, normalize, rotate_and_keep


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square normalization over the last dimension."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """Gated MLP. `gate_up` yields both halves in one multiplication: gate first, then up."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gate(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Grouped-query attention. `qkv` yields all heads in one multiplication: queries, keys, values."""

    qkv: Linear
    output: Linear
    query_norm: RmsNorm | None  # per head, before the rotation (Qwen3)
    key_norm: RmsNorm | None
    heads: int
    kv_heads: int
    head_dim: int
    window: Window
    keys: torch.Tensor  # the layer's pool, flat: [pages * page_size, kv_heads, head_dim]
    values: torch.Tensor

    def project(self, x: torch.Tensor, batch: PackedBatch, rotation: Rotation) -> torch.Tensor:
        """Queries `[T, heads, head_dim]` of the batch; its K and V are in the pool afterwards."""
        heads = self.qkv(x).view(batch.tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = heads[:, : self.heads], heads[:, self.heads : -self.kv_heads]
            queries.copy_(self.query_norm(queries))
            keys.copy_(self.key_norm(keys))
        return rotate_and_keep(heads, rotation, batch.slots, self.keys, self.values)

    def attend(self, queries: torch.Tensor, layout: Layout) -> torch.Tensor:
        """What the queries of `layout` found in the pool, `[T, hidden]`."""
        return self.output(attend(queries, self.keys, self.values, layout))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, then the MLP, each on normalized input and added to the residual stream."""

    layer: int  # global id
    attention_norm: RmsNorm
    attention: SelfAttention
    mlp_norm: RmsNorm
    mlp: DenseMlp | SparseMlp

    def __call__(
        self,
        hidden: torch.Tensor,
        batch: PackedBatch,
        rotation: Rotation,
        written: Callable[[], None] | None,
        sampled_only: bool = False,
    ) -> torch.Tensor:
        """`written` is called when K and V of the whole batch are in the pool. `sampled_only`: what comes out is of
        the tokens whose logits are wanted, because nothing else reads a model's last layer."""
        queries = self.attention.project(self.attention_norm(hidden), batch, rotation)
        if written is not None:
            written()
        if sampled_only:
            hidden, queries = hidden.index_select(0, batch.sampled), queries.index_select(0, batch.sampled)
        if not len(queries):
            return hidden
        hidden = hidden + self.attention.attend(queries, batch.layout(self.attention.window, sampled_only))
        return hidden + self.mlp(self.mlp_norm(hidden))
