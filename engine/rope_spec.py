"""Which rotary position embedding a config asks for. Numbers only; `rope.py` makes the frequencies.

In: the parsed `config.json`, in the layout of transformers 5 (`rope_parameters`) or older
(`rope_theta` and `rope_scaling`). Out: a frozen `Rope`, or `UnsupportedModel` naming the option.
Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Scaling = Literal["default", "linear", "llama3", "yarn"]


class UnsupportedModel(ValueError):
    """The model folder asks for something that this runtime cannot do; the message names it."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding over the whole head. Fields past `factor` matter for some scalings only."""

    theta: float
    scaling: Scaling = "default"
    factor: float = 1.0
    original_positions: int = 0  # llama3, yarn: context length before the scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: correction range rounded to whole dimensions
    attention_factor: float = 1.0  # yarn: cosines and sines are multiplied by it


def parse_rope(config: Mapping[str, Any], default_theta: float, max_positions: int) -> Rope:
    """The rotary embedding of `config`. Raises `UnsupportedModel`."""
    # A rope_scaling in the file wins over rope_parameters, as in transformers.
    values = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in values.values()):
        raise UnsupportedModel("rope_parameters that differ by layer type are not supported")
    scaling = values.get("rope_type") or values.get("type") or "default"
    if scaling not in get_args(Scaling):
        raise UnsupportedModel(f"rope_type {scaling!r} is not supported; supported are {', '.join(get_args(Scaling))}")
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial!r} is not supported; only whole heads are rotated")
    theta = float(values.get("rope_theta") or config.get("rope_theta") or default_theta)
    if scaling == "default":
        return Rope(theta)
    original = int(
        config.get("original_max_position_embeddings")
        or values.get("original_max_position_embeddings")
        or max_positions
    )
    factor = values.get("factor")
    if factor is None and scaling == "yarn":
        factor = max_positions / original
    if factor is None:
        raise UnsupportedModel(f"rope_type {scaling!r} needs a factor, and the config has none")
    if scaling == "linear":
        return Rope(theta, "linear", float(factor))
    if scaling == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            if key not in values:
                raise UnsupportedModel(f"rope_type 'llama3' needs {key}, and the config has none")
        return Rope(
            theta,
            "llama3",
            float(factor),
            original,
            low_freq_factor=float(values["low_freq_factor"]),
            high_freq_factor=float(values["high_freq_factor"]),
        )
    return Rope(
        theta,
        "yarn",
        float(factor),
        original,
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, float(factor)),
    )


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """Explicit, or the paper's rule (with the DeepSeek variant when both mscales are given)."""
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(float(values["mscale"])) / mscale(float(values["mscale_all_dim"]))
    return mscale(1.0)
