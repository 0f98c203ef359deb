"""Turns a GGUF file of the Llama architecture into a Hugging Face folder, dequantized to float32.

In: a GGUF file with a byte-level BPE tokenizer of SmolLM2's kind. Out: `config.json`,
`model.safetensors`, `tokenizer.json`, `tokenizer_config.json` (with the chat template) and
`generation_config.json` in an existing folder.

Invariants: the same file always gives the same bytes; one tensor at a time is in memory.
Needs the `gguf` and `tokenizers` packages. `transformers` can open GGUF files itself, but it keeps
this model quantized (very slow) and tokenizes some texts differently from llama.cpp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
from gguf import GGUFReader
from gguf.quants import dequantize

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # llama.cpp's type of tokens that text never yields


def convert(source: Path, folder: Path, progress: Callable[[float], None] | None = None) -> None:
    """Write the Hugging Face files of `source` into `folder`; `progress(fraction)` as tensors are written.

    Raises `ValueError` for another architecture or an unknown tensor.
    """
    reader = GGUFReader(source)
    fields = _Fields(reader)
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"{source} holds architecture {architecture!r}; only llama can be converted")
    config = _config(fields, reader)
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _write_tokenizer(fields, config, folder)
    _write_weights(reader, config, folder / "model.safetensors", progress)


class _Fields:
    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise ValueError(f"the GGUF file has no field {key}")
        return self._fields[key].contents()


def _config(fields: _Fields, reader: GGUFReader) -> dict[str, Any]:
    shapes = {tensor.name: _shape(tensor) for tensor in reader.tensors}
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "max_position_embeddings": fields["llama.context_length"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": "float32",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(fields: _Fields, config: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_weights(
    reader: GGUFReader, config: dict[str, Any], path: Path, progress: Callable[[float], None] | None
) -> None:
    """A safetensors file, written tensor by tensor (the library's own writer wants them all in memory)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in reader.tensors:
        size = 4 * math.prod(_shape(tensor))
        header[_hf_name(tensor.name)] = {
            "dtype": "F32",
            "shape": list(_shape(tensor)),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data must start on a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in _float32_tensors(reader, config):
            file.write(values.data)
            if progress is not None:
                progress((file.tell() - 8 - len(text)) / offset)


def _float32_tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[numpy.ndarray]:
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        if ".attn_q." in tensor.name:
            values = _halves_from_pairs(values, config["num_attention_heads"])
        if ".attn_k." in tensor.name:
            values = _halves_from_pairs(values, config["num_key_value_heads"])
        yield numpy.ascontiguousarray(values)


def _halves_from_pairs(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, Hugging Face rows (i, i + half)."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[kind]}.weight"
    raise ValueError(f"GGUF tensor {name} has no place in a Llama model")


def _shape(tensor: Any) -> tuple[int, ...]:
    """GGUF lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _shortest(value: float) -> float:
    """GGUF stores float32; 9.999999747378752e-06 was written as 1e-05."""
    return float(str(numpy.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
