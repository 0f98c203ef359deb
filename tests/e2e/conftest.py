"""Models for the end-to-end tests: the real one, and a small random one that runs fast."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from engine.smollm2 import ensure_default_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="session")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight random layers with the real tokenizer; the large range keeps greedy choices far apart."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=160, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=8192, initializer_range=0.15,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, folder / name)
    return folder
