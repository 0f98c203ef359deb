"""The mixture-of-experts MLP of Mixtral and Qwen3-MoE.

In: hidden states `[T, hidden]`. Out: the same shape.
Invariant: a token's experts are summed in the order in which the router ranked them, whatever other
tokens are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.linear import Linear

Expert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """A router and its experts; each token goes through the `per_token` best ones."""

    router: Linear
    experts: Sequence[Expert]
    per_token: int
    normalize: bool  # chosen weights are rescaled to sum to 1
    float32_weights: bool  # chosen weights stay float32 when the model runs in another dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, self.per_token, dim=-1)  # [T, per_token]
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if not self.float32_weights:
            weights = weights.to(x.dtype)
        # One slot per (token, rank of the expert), filled expert by expert, summed over the ranks.
        outputs = x.new_empty(chosen.numel(), x.shape[-1])
        flat = chosen.reshape(-1)
        for expert in torch.unique(flat).tolist():
            slots = (flat == expert).nonzero().squeeze(1)
            outputs[slots] = self.experts[expert](x[slots // self.per_token])
        weighted = outputs * weights.reshape(-1, 1)
        return weighted.view(*chosen.shape, -1).sum(dim=1).to(x.dtype)
