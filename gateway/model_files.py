"""The part of a model folder that the gateway needs: tokenizer, chat template, limits.

In: a folder in Hugging Face layout (tokenizer.json, tokenizer_config.json, config.json,
optionally generation_config.json, special_tokens_map.json, chat_template.jinja). Out: `ModelFiles`.
Weights are never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate
from gateway.detokenize import Vocabulary
from gateway.errors import invalid

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelFiles:
    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))
        # A tokenizer.json may carry settings from training that would cut prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = Vocabulary(self._tokenizer)
        config = _read(folder / "config.json")
        tokenizer_config = _read(folder / "tokenizer_config.json")
        text_config = config.get("text_config") or config
        self.vocab_size = int(text_config.get("vocab_size") or self._tokenizer.get_vocab_size())
        self.max_model_len = int(text_config.get("max_position_embeddings") or 2**31 - 1)
        self.eos_ids = _ids(config.get("eos_token_id")) | _ids(
            _read(folder / "generation_config.json").get("eos_token_id")
        )
        self.highest_token_id = max(self._tokenizer.get_vocab().values(), default=0)
        special = _special_tokens(_read(folder / "special_tokens_map.json") | tokenizer_config)
        source = _template_source(folder, tokenizer_config)
        self._template = None if source is None else ChatTemplate(source, special)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if self._template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages")
        return self._template.render(messages, add_generation_prompt, variables)


def _read(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}


def _ids(value: Any) -> dict[int, None]:
    """One id or a list of them, as an ordered set."""
    return dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value])


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Each may be a string or an object with the string in `content`."""
    found = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
