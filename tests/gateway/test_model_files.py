"""Tokenizer and chat template must do what transformers does with the same folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.chat_template import ChatTemplate
from gateway.errors import ApiError
from gateway.model_files import ModelFiles

CHAT = [
    {"role": "system", "content": "You are <|im_end|> \u00fcber."},
    {"role": "user", "content": "Hi  there\n"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "漢字 👩‍👩‍👧‍👦"},
]

TRICKY = """
{%- for m in messages %}
    {%- if m.role == "bad" %}{{ raise_exception("no bad role") }}{% endif %}
    {%- if m.role == "skip" %}{% continue %}{% endif %}
{{ bos_token }}{{ m | tojson }}{% generation %}<{{ m.content }}>{% endgeneration %}
{%- endfor %}
{{ strftime_now("%Y")[:2] }}{{ enable_thinking }}{% if add_generation_prompt %}>>{% endif %}"""


@pytest.mark.parametrize("messages", [CHAT, CHAT[1:2], CHAT[1:]])
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chat_equals_transformers(
    files: ModelFiles, reference: Any, messages: list[dict[str, Any]], generation_prompt: bool
) -> None:
    text = files.render_chat(messages, generation_prompt)
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    ids = reference.apply_chat_template(messages, add_generation_prompt=generation_prompt, return_dict=False)
    assert files.encode(text, add_special_tokens=False) == ids


def test_what_templates_may_use() -> None:
    template = ChatTemplate(TRICKY, {"bos_token": "<s>"})
    messages = [{"role": "skip"}, {"role": "user", "content": "é<"}]
    text = template.render(messages, variables={"enable_thinking": False, "bos_token": "mine", "messages": []})
    assert text == '<s>{"role": "user", "content": "é<"}<é<>20False>>'


def test_a_template_that_refuses_is_the_clients_error() -> None:
    template = ChatTemplate(TRICKY, {})
    with pytest.raises(ApiError, match="no bad role") as caught:
        template.render([{"role": "bad"}])
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 'x' * messages }}", "{{ 1 // 0 }}"],
)
def test_templates_are_caged(source: str) -> None:
    with pytest.raises(ApiError):
        ChatTemplate(source, {}).render([])


def test_where_templates_may_stand(tmp_path: Path, model_folder: Path) -> None:
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    with pytest.raises(ApiError, match="no chat template"):
        ModelFiles(tmp_path).render_chat([])
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "{{ eos_token }}"}]
    config = {"chat_template": named, "eos_token": {"content": "<e>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ModelFiles(tmp_path).render_chat([]) == "<e>"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert ModelFiles(tmp_path).render_chat([]) == "from the file"


def test_ends_and_limits(files: ModelFiles) -> None:
    assert list(files.eos_ids) == [2]
    assert (files.vocab_size, files.max_model_len) == (49152, 8192)


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        ModelFiles(tmp_path)
