"""Renders chat messages with a model's own template.

In: a Jinja template from the model folder, messages as plain dicts. Out: the prompt text; or an
`ApiError` (400) when the template refuses the messages. The environment is the one Hugging Face
templates are written for; it is sandboxed, because templates come with downloaded models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import invalid


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Unlike Jinja's own filter this one does not escape for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of the template: bos_token, eos_token, …"""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControls]
        )
        environment.filters["tojson"] = _tojson
        functions: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        environment.globals.update(functions)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`variables` are the client's own for the template; they cannot replace ours."""
        context = {
            "tools": None,
            "documents": None,
            **(variables or {}),
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except Exception as error:  # a template is a program: whatever stops it is about these messages
            raise invalid(f"the model's chat template refuses these messages: {error}", "messages") from None
