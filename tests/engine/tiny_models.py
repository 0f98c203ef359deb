"""Tiny random checkpoints of each family, made by `transformers` from a fixed seed, and its answers to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

VOCAB = 128
NEW_TOKENS = 12

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Far larger than a trained model's, so that logits are well separated and a wrong one shows.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# Each entry: the model type of `transformers`, and what sets this model apart.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-tied-llama3": ("llama", {"tie_word_embeddings": True, "rope_scaling": _LLAMA3}),
    "llama-biases-linear": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "llama-yarn": ("llama", {"rope_scaling": _YARN}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2-some-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32, "initializer_range": 0.5}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@dataclass(frozen=True)
class Reference:
    """A checkpoint, prompts for it, and the greedy continuations that `transformers` gives each alone."""

    folder: Path
    prompts: list[list[int]]
    continuations: list[list[int]]


def save_tiny(
    name: str, folder: Path, sizes: Mapping[str, object] | None = None, **save_options: object
) -> torch.nn.Module:
    """Write the tiny model `name` to `folder`; always the same weights for the same sizes. Returns the model."""
    model_type, options = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **{**_SIZES, **options, **(sizes or {})})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # Freshly made models have zero biases and unit norms, which would hide that they are not applied.
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in parameter_name else 0.0, std=0.2)
    model.save_pretrained(folder, **save_options)
    return model


def greedy(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
        )
    return [int(token) for token in answer[0, len(prompt) :]]
