"""The one place where weight matrices are multiplied.

In: rows `[T, in]`. Out: rows `[T, out]`. Every projection of a stage, the output head included,
is a `Linear`, so how rows are padded, packed or tiled can be decided here for all of them.
"""

from __future__ import annotations

import torch
from torch.nn import functional


class Linear:
    """`y = x W^T + b`, with W `[out, in]` and x in the model dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self.weight, self.bias)
