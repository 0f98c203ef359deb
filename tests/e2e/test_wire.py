"""What a request costs on the wire: its KV, once, and nothing for the empty part of its last page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LAYERS, BYTES_PER_TOKEN = 8, 2 * 2 * 16 * 4  # of a layer: K and V, 2 heads of 16, float32


@pytest.mark.parametrize("backend", ["mooncake", "nixl", "stream"])
def test_bytes_on_the_wire_are_the_prompts_kv(tiny: Path, backend: str) -> None:
    with Cluster("--transfer-backend", backend, "--chunk-size", "64", model=tiny, prefill_pp=3) as cluster:
        cluster.generate([7], 2)
        for length in (1, 15, 16, 17, 100, 1000):
            before = cluster.counter("prefill", "kv_bytes_sent")
            cluster.generate(list(range(5, 5 + length)), 2)
            sent = cluster.counter("prefill", "kv_bytes_sent") - before
            assert sent == pytest.approx(length * LAYERS * BYTES_PER_TOKEN, rel=0.01), length


def test_layers_with_a_window_send_only_what_is_still_seen(tiny: Path, tmp_path: Path) -> None:
    """Layers 3 to 5 of six see 64 positions: of a prompt of 200 they hand over 63. The tokens stay the reference's."""
    torch.manual_seed(7)
    config = transformers.Qwen2Config(
        vocab_size=49152, hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, initializer_range=0.15, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, use_sliding_window=True, sliding_window=64,
        max_window_layers=3, torch_dtype="float32",
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, tmp_path / name)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = [(7 * i) % 1000 + 5 for i in range(200)]
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    with Cluster("--chunk-size", "48", model=tmp_path, prefill_pp=2, decode_pp=3) as cluster:
        assert cluster.generate(prompt, 24) == wanted[0, len(prompt) :].tolist()
        assert cluster.counter("prefill", "kv_bytes_sent") == (3 * 200 + 3 * 63) * BYTES_PER_TOKEN
        assert cluster.counter("decode", "prompt_tokens_computed") == 0
