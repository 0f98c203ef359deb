"""What a config.json means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from engine.checkpoint import UnsupportedModel, parse_spec, read_spec

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
}


def test_absent_keys_take_the_family_default_of_transformers(tmp_path: Path) -> None:
    for family in ("llama", "mistral", "mixtral", "qwen2", "qwen3"):
        ours = parse_spec({**LLAMA, "model_type": family, "num_key_value_heads": 4})
        given = {key: value for key, value in LLAMA.items() if key != "model_type"}
        theirs = transformers.AutoConfig.for_model(family, **given, num_key_value_heads=4)
        theirs.save_pretrained(tmp_path)
        explicit = read_spec(tmp_path)
        differing = {"eos_ids", "dtype"}
        for field in ours.__slots__:
            assert field in differing or getattr(ours, field) == getattr(explicit, field), (family, field)


def test_both_layouts_of_rope_mean_the_same() -> None:
    old = parse_spec({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}})
    new = parse_spec({**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4}})
    assert old.rope == new.rope
    assert old.rope.theta == 5e5
    assert old.rope.factor == 4


def test_windows_follow_the_family() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 8, "max_window_layers": 1}
    assert parse_spec(qwen).windows == (None, None, None)
    assert parse_spec({**qwen, "use_sliding_window": True}).windows == (None, 8, 8)
    mistral = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
    assert parse_spec({**mistral, "sliding_window": 8}).windows == (8, 8, 8)
    assert parse_spec({**mistral, "sliding_window": None}).windows == (None, None, None)


def test_sparse_layers_of_qwen3_moe_follow_the_step_and_the_exceptions() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 6}
    moe = {**LLAMA, "model_type": "qwen3_moe", **sizes}
    assert parse_spec(moe).moe_layers == set(range(6))
    assert parse_spec({**moe, "decoder_sparse_step": 2, "mlp_only_layers": [3]}).moe_layers == {1, 5}
    with pytest.raises(UnsupportedModel, match="num_experts_per_tok 9 is more than the 8 experts"):
        parse_spec({**moe, "num_experts_per_tok": 9})


def test_eos_ids_of_the_generation_config_win() -> None:
    assert parse_spec({**LLAMA, "eos_token_id": 2}).eos_ids == (2,)
    assert parse_spec({**LLAMA, "eos_token_id": 2}, {"eos_token_id": [5, 6]}).eos_ids == (5, 6)
    assert parse_spec(LLAMA, {}).eos_ids == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"vocab_size": None}, "does not say vocab_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"model_type": "qwen2", "num_key_value_heads": 2, "layer_types": ["chunked_attention"] * 3}, "chunked"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_spec({**LLAMA, **change})
