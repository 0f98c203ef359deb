"""What a Hugging Face `config.json` asks for, as one frozen `ModelSpec`.

In: a model folder (or the parsed JSON). Out: a `ModelSpec` that says everything the generic decoder
needs, or `UnsupportedModel` naming the option that it cannot honour.

Invariants: absent keys take the default that `transformers` gives this family, so a folder means
here what it means there; an option that would change the result is never ignored silently.
This module does not import torch: small processes read specs too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.rope_spec import Rope, UnsupportedModel, parse_rope

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture-of-experts MLP: a router sends each token to `per_token` of `experts` gated MLPs."""

    experts: int
    per_token: int
    mlp: int  # intermediate size of one expert
    normalize: bool  # the chosen experts' weights are rescaled to sum to 1
    float32_weights: bool  # they stay float32 where the model runs in bfloat16 (Mixtral)
    prefix: str  # of the block's tensors, under `model.layers.N.`
    names: tuple[str, str, str]  # an expert's gate, up and down projections


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The architecture of one decoder-only model. Sizes are numbers of elements."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    rms_eps: float
    rope: Rope
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: how many last positions it sees, itself included; None = all
    moe: Moe | None
    moe_layers: frozenset[int]
    eos_ids: tuple[int, ...]
    dtype: str  # of the stored weights, as the folder says it

    def layer_parameters(self, layer: int) -> int:
        """Weights that one token goes through in `layer` (of the experts, the chosen ones)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.moe is not None and layer in self.moe_layers:
            return attention + self.hidden * (self.moe.experts + 3 * self.moe.mlp * self.moe.per_token)
        return attention + 3 * self.hidden * self.mlp

    def head_parameters(self) -> int:
        """Weights that one sampled position goes through in the output head."""
        return self.hidden * self.vocab


@dataclass(frozen=True, slots=True)
class _Family:
    """Where one model type differs from Llama. `None` for a bias: the config's `attention_bias` decides."""

    qkv_bias: bool | None = False
    o_bias: bool | None = False
    qk_norm: bool = False
    head_dim: int | None = None  # default; None = hidden / heads
    rms_eps: float = 1e-6
    theta: float = 10_000.0
    kv_heads: int | None = None  # default; None = heads
    window: Literal["never", "every layer", "if used", "by layer"] = "never"
    default_window: int | None = 4096
    max_positions: int = 32768


_FAMILIES = {
    "llama": _Family(qkv_bias=None, o_bias=None, max_positions=2048),
    "mistral": _Family(window="every layer", kv_heads=8, max_positions=131072),
    "mixtral": _Family(
        window="every layer", default_window=None, kv_heads=8, rms_eps=1e-5, theta=1e6, max_positions=131072
    ),
    "qwen2": _Family(qkv_bias=True, window="by layer", kv_heads=32),
    "qwen3": _Family(qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, window="by layer", kv_heads=32),
    "qwen3_moe": _Family(qkv_bias=None, o_bias=None, qk_norm=True, window="if used", kv_heads=4),
}

# Options of other model types that configs of these families sometimes carry. Honouring them needs
# code that is not here, and ignoring them would give wrong tokens.
_REFUSED_WHEN_SET = (
    "quantization_config",
    "compression_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "dual_chunk_attention_config",
    "rope_interleaved",
    "use_mrope",
    "logit_scale",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
)


def read_spec(folder: Path | str) -> ModelSpec:
    """The spec of the model in `folder` (needs `config.json`; reads `generation_config.json` if there).

    Raises `FileNotFoundError` without a config, `UnsupportedModel` for what cannot be honoured.
    """
    config = json.loads(Path(folder, "config.json").read_text())
    generation_path = Path(folder, "generation_config.json")
    generation = json.loads(generation_path.read_text()) if generation_path.exists() else {}
    return parse_spec(config, generation)


def parse_spec(config: Config, generation: Config | None = None) -> ModelSpec:
    """The spec that a parsed `config.json` (and `generation_config.json`) describes.

    Raises `UnsupportedModel`.
    """
    name = config.get("model_type")
    family = _FAMILIES.get(str(name))
    if family is None:
        raise UnsupportedModel(f"model_type {name!r} is not supported; supported are {', '.join(sorted(_FAMILIES))}")
    for key in _REFUSED_WHEN_SET:
        if config.get(key):
            raise UnsupportedModel(f"config.json sets {key}, which is not supported")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; only 'silu' is")

    layers = _size(config, "num_hidden_layers")
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _optional_size(config, "num_key_value_heads", family.kv_heads) or heads
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        kv_heads = heads  # an explicit null means plain multi-head attention
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = _optional_size(config, "head_dim", family.head_dim) or hidden // heads
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd, and rotary embeddings need an even one")
    max_positions = _optional_size(config, "max_position_embeddings", family.max_positions) or family.max_positions
    attention_bias = bool(config.get("attention_bias", False))
    moe = _parse_moe(str(name), config)
    return ModelSpec(
        family=str(name),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"),
        rms_eps=float(config.get("rms_norm_eps", family.rms_eps)),
        rope=parse_rope(config, family.theta, max_positions),
        max_positions=max_positions,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=name == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        windows=_windows(config, family, layers),
        moe=moe,
        moe_layers=_moe_layers(config, moe, layers),
        eos_ids=_eos_ids(config, generation or {}),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _size(config: Config, key: str) -> int:
    value = _optional_size(config, key, None)
    if value is None:
        raise UnsupportedModel(f"config.json does not say {key}")
    return value


def _optional_size(config: Config, key: str, default: int | None) -> int | None:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"{key} is {value!r}; a positive whole number is needed")
    return value


def _windows(config: Config, family: _Family, layers: int) -> tuple[int | None, ...]:
    """The sliding window of every layer, by the family's rule for whether the config's window counts."""
    window = _optional_size(config, "sliding_window", None if "sliding_window" in config else family.default_window)
    if family.window == "never" or (family.window != "every layer" and not config.get("use_sliding_window", False)):
        window = None
    types = config.get("layer_types")
    if family.window == "by layer" and types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    if types is None:
        return (window,) * layers
    if len(types) != layers:
        raise UnsupportedModel(f"layer_types has {len(types)} entries for num_hidden_layers {layers}")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"layer_types has {kind!r}; only full_attention and sliding_attention are supported")
    if family.window != "by layer" and len(set(types)) > 1:
        raise UnsupportedModel(
            f"layer_types that differ by layer are not supported for model_type {config['model_type']!r}"
        )
    if family.window != "by layer":
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _parse_moe(name: str, config: Config) -> Moe | None:
    if name == "mixtral":
        return Moe(
            experts=_optional_size(config, "num_local_experts", 8) or 8,
            per_token=_optional_size(config, "num_experts_per_tok", 2) or 2,
            mlp=_size(config, "intermediate_size"),
            normalize=True,
            float32_weights=True,
            prefix="block_sparse_moe",
            names=("w1", "w3", "w2"),
        )
    if name == "qwen3_moe":
        # transformers 5 writes num_local_experts, older folders num_experts
        key = "num_experts" if "num_experts" in config else "num_local_experts"
        return Moe(
            experts=_size(config, key),
            per_token=_size(config, "num_experts_per_tok"),
            mlp=_size(config, "moe_intermediate_size"),
            normalize=bool(config.get("norm_topk_prob", False)),
            float32_weights=False,
            prefix="mlp",
            names=("gate_proj", "up_proj", "down_proj"),
        )
    return None


def _moe_layers(config: Config, moe: Moe | None, layers: int) -> frozenset[int]:
    if moe is None:
        return frozenset()
    if moe.per_token > moe.experts:
        raise UnsupportedModel(f"num_experts_per_tok {moe.per_token} is more than the {moe.experts} experts")
    if config["model_type"] == "mixtral":
        return frozenset(range(layers))
    step = _optional_size(config, "decoder_sparse_step", 1) or 1
    dense = set(config.get("mlp_only_layers") or ())
    return frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _eos_ids(config: Config, generation: Config) -> tuple[int, ...]:
    """End-of-sequence ids; the generation config wins, as it does in `transformers`' generate."""
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
