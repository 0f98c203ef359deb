"""The steps of a layer that take each row by itself: compiled where the kernels were built, else in torch.

In: rows of a packed batch, in the model dtype. Out: rows of the same dtype.

Invariant: the bits of a row depend on that row (and its position) alone; the order of operations and of dtypes is
that of `transformers` (normalize in float32, round to the model dtype, then scale), because greedy tokens must equal
its own.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.native.steps import steps
from engine.rope import rotate

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of a batch, each `[T, 1, head_dim]`


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalization over the last dimension of `[T, width]` or `[T, heads, width]`."""
    if compiled := steps(x.dtype):
        return compiled.normalize(x, weight, eps)
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` `[T, width]` of both halves `[T, 2 * width]`, gate first."""
    if compiled := steps(gate_up.dtype):
        return compiled.gate(gate_up)
    # The halves stay views: row by row, vector instructions and their tails fall on the same elements
    # whatever the number of rows. A contiguous copy would be cut up elsewhere for each batch size.
    first, second = gate_up.chunk(2, dim=-1)
    return functional.silu(first) * second


def rotate_and_keep(
    heads: torch.Tensor,
    rotation: Rotation,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Rotates queries and keys, and writes keys and values of the batch into one layer's pool.

    `heads` `[T, queries + 2 * kv_heads, head_dim]`: queries, keys, values; may be written to. `keys`, `values`: flat,
    `[pages * page_size, kv_heads, head_dim]`, written at `slots` int64 `[T]`. Returns the queries
    `[T, queries, head_dim]`.
    """
    if compiled := steps(heads.dtype):
        return compiled.rotate_and_keep(heads, rotation, slots, keys, values)
    kv_heads = keys.shape[1]
    rotated = rotate(heads[:, :-kv_heads], *rotation)
    keys.index_copy_(0, slots, rotated[:, -kv_heads:])
    values.index_copy_(0, slots, heads[:, -kv_heads:])
    return rotated[:, :-kv_heads]
