"""Fields of other servers' APIs that would change the answer and that this gateway cannot honour.

In: a request as read. Out: nothing, or an `ApiError` (400) that names the field. Pure. A value that
asks for nothing (`null`, `false`, `0`, an empty string or list) is accepted: real clients send those.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.errors import invalid


class RefusedFields(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's first, then vLLM's and SGLang's; read only to be refused."""

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    response_format: Any = None
    suffix: Any = None
    audio: Any = None
    web_search_options: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None


# What else asks for nothing, where that is not the field's "empty" value.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),  # without tools there is nothing to choose from
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
}
_NOT_EVEN_FALSE = ("skip_special_tokens", "prompt_logprobs")  # here false, or 0, asks for something


def refuse(request: RefusedFields) -> None:
    for name in RefusedFields.__struct_fields__:
        value = getattr(request, name)
        if value is None or value in _HARMLESS.get(name, ()):
            continue
        if name == "tools" and request.tool_choice == "none":
            continue
        if value or name in _NOT_EVEN_FALSE:
            raise invalid(f"{name} is not supported (docs/api.md lists what is)", name)
