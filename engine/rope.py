"""Rotary position embeddings: the frequencies of a `Rope`, and their application to heads.

In: a `Rope`, positions, query and key heads. Out: rotated heads.
Invariant: the order of operations and of dtypes is that of `transformers`, so that bits agree.
"""

from __future__ import annotations

import math

import torch

from engine.rope_spec import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """float32 `[head_dim / 2]`: radians per position of each rotated pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, head_dim, rope.theta**exponents)


def cosines_and_sines(
    positions: torch.Tensor, frequencies: torch.Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """For int64 positions `[T]`: cos and sin `[T, 1, head_dim]`, ready to broadcast over heads."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads `[T, n, head_dim]`; dimension i is paired with i + head_dim / 2."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * cos) + (swapped * sin)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed down by the factor, short ones kept, those between interpolated."""
    longest = rope.original_positions / rope.low_freq_factor
    shortest = rope.original_positions / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > longest, plain / rope.factor, plain)
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(is_between, between, scaled)


def _yarn(rope: Rope, head_dim: int, periods: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often are kept, those that turn rarely are interpolated, with a ramp between."""

    def dimension_turning(times: float) -> float:
        return (head_dim * math.log(rope.original_positions / (times * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept
