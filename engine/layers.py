"""One decoder layer, generic over the supported families.

In: hidden states `[T, hidden]` of a packed batch. Out: the same shape, with the layer's K and V of
the batch written to the pool on the way.

Invariant: the order of operations and dtypes is that of `transformers` (normalize in float32, round
to the model dtype, then scale), because greedy tokens must equal its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.attention import PackedBatch, Window, attend
from engine.linear import Linear
from engine.moe import SparseMlp
from engine.rope import rotate


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square normalization over the last dimension."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """Gated MLP. `gate_up` yields both halves in one multiplication: gate first, then up."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The halves stay views: row by row, vector instructions and their tails fall on the same elements
        # whatever the number of rows. A contiguous copy would be cut up elsewhere for each batch size.
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


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

    def __call__(
        self,
        x: torch.Tensor,
        batch: PackedBatch,
        rotation: tuple[torch.Tensor, torch.Tensor],
        written: Callable[[], None] | None,
    ) -> torch.Tensor:
        """`written` is called when K and V of the whole batch are in the pool."""
        heads = self.qkv(x).view(batch.tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        rotated, values = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = rotated[:, : self.heads], rotated[:, self.heads :]
            rotated = torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=1)
        rotated = rotate(rotated, *rotation)
        self.keys.index_copy_(0, batch.slots, rotated[:, self.heads :])
        self.values.index_copy_(0, batch.slots, values)
        if written is not None:
            written()
        attended = attend(rotated[:, : self.heads], self.keys, self.values, batch.gather(self.window))
        return self.output(attended)


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
        rotation: tuple[torch.Tensor, torch.Tensor],
        written: Callable[[], None] | None,
    ) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), batch, rotation, written)
        return hidden + self.mlp(self.mlp_norm(hidden))
