"""Prompts of every kind a user sends, as token ids; and the reference's answers to them."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

TEXTS = [
    "The",
    "Hello",
    "The capital of France is",
    "Write two sentences about the sea.",
    "Once upon a time, in a village by the river,",
    "def fibonacci(n):\n    ",
    "import asyncio\n\nasync def main():\n    reader, writer = await asyncio.open_connection(",
    "SELECT name, count(*) FROM orders WHERE",
    '{"name": "paceline", "version": ',
    "Die Hauptstadt von Österreich ist",
    "Il était une fois une petite fille qui",
    "Москва — столица",
    "東京は日本の",
    "人工智能是",
    "한국의 수도는",
    "مرحبا بالعالم، هذا",
    "नमस्ते दुनिया, यह",
    "I ❤️ pizza 🍕 and 👨‍👩‍👧‍👦 because",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
]


def prompts(folder: Path) -> list[list[int]]:
    """24 prompts from one token to 3 000, in the tokenizer of the model in `folder`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in TEXTS]
    licence = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text()).ids
    long = (licence + licence[::-1])[:3000]
    return [*encoded, licence[:300], licence[100:1100], long]


def reference(folder: Path, tokens: int) -> list[list[int]]:
    """Greedy answers by transformers' own `generate`, float32, one prompt at a time.

    They depend on the weights, the prompts and the library alone, so they are kept between runs.
    """
    asked = prompts(folder)
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    key = hashlib.sha256(json.dumps([asked, tokens, weights, transformers.__version__, torch.__version__]).encode())
    cache = Path(os.environ.get("PACELINE_CACHE", Path.home() / ".cache" / "paceline"))
    path = cache / "references" / f"{key.hexdigest()[:24]}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([_generate(folder, prompt, tokens) for prompt in asked]))
    answers: list[list[int]] = json.loads(path.read_text())
    return answers


@lru_cache(maxsize=1)
def _model(folder: Path) -> transformers.PreTrainedModel:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _generate(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        made = _model(folder).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
        )
    return made[0, len(prompt) :].tolist()
