"""Reads OpenAI-style request bodies.

In: the bytes of a body. Out: `ChatRequest` or `CompletionRequest`, or an `ApiError` (400) that
names the field. Pure. Unknown fields are accepted and ignored; `null` means "not given". What
would change the answer and cannot be done (`gateway.refusals`) is refused, never ignored.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from gateway.errors import ApiError, invalid
from gateway.refusals import RefusedFields, refuse

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128  # of one request, over all its prompts


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(RefusedFields, frozen=True, kw_only=True):
    """What both endpoints share. Names are OpenAI's; those OpenAI lacks are vLLM's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    user: Any = None

    @property
    def choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> tuple[str, int] | None:
        """The explicit limit, with the name of the field that set it."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    prompt: Any  # checked by hand: a union of lists cannot be told apart by type
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_tokens(self) -> tuple[str, int] | None:
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)


class TokenizeRequest(msgspec.Struct, frozen=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    tokens: list[int]
    model: str | None = None


Prompt = str | list[int]
GenerationRequest = ChatRequest | CompletionRequest
_Body = TypeVar("_Body", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def parse_chat(body: bytes) -> ChatRequest:
    request = _decode(body, ChatRequest)
    _check_sampling(request)
    if request.max_completion_tokens is not None and request.max_completion_tokens < 1:
        raise _below("max_completion_tokens", request.max_completion_tokens, 1)
    if request.top_logprobs is not None:
        _within("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)
        if not request.logprobs and request.top_logprobs > 0:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    _check_messages(request.messages)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    request = _decode(body, CompletionRequest)
    _check_sampling(request)
    if request.logprobs is not None:
        _within("logprobs", request.logprobs, 0, MAX_LOGPROBS)
        if request.echo:
            raise invalid("echo with logprobs needs those of the prompt, which are not computed; drop one", "echo")
    if request.best_of not in (None, request.choices_per_prompt):
        raise invalid(
            f"best_of must equal n: all of the {request.choices_per_prompt} choices are returned, unranked", "best_of"
        )
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    request = _decode(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if request.messages is not None:
        _check_messages(request.messages)
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    return _decode(body, DetokenizeRequest)


def prompts_of(request: CompletionRequest) -> list[Prompt]:
    """Each prompt as text or as token ids. A flat list of numbers is one prompt."""
    prompt = request.prompt
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    prompts = prompt if several else [prompt]
    for at, one in enumerate(prompts):
        if not (isinstance(one, str) or (isinstance(one, list) and all(type(token) is int for token in one))):
            where = f"prompt[{at}]" if several else "prompt"
            raise invalid(f"{where} must be a string or a list of token ids", where)
    choices = len(prompts) * request.choices_per_prompt
    if choices > MAX_CHOICES:
        raise invalid(f"{choices} choices (prompts times n) are too many: at most {MAX_CHOICES}", "prompt")
    return prompts


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: content that came as text parts becomes one string."""
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        plain.append({**message, "content": "" if content is None else content})
    return plain


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        if message.startswith("Expected `object`, got") and " - at `" not in message:
            message = f"the body must be a JSON object: {message[0].lower()}{message[1:]}"
        raise invalid(message, _param(message)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


def _param(message: str) -> str | None:
    """The field a msgspec error is about: "… - at `$.max_tokens`" or "… missing required field `prompt`"."""
    if " - at `" in message:
        path = message.rsplit(" - at `", 1)[1].rstrip("`")
        return path.removeprefix("$.").removeprefix("$") or None
    if "required field `" in message:
        return message.rsplit("required field `", 1)[1].split("`", 1)[0]
    return None


def _below(param: str, value: float, least: float) -> ApiError:
    return invalid(f"{param} must be at least {least}, not {value}", param)


def _within(param: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    # Written so that NaN fails too.
    if not ((low < value if open_low else low <= value) and value <= high):
        bounds = f"{'(' if open_low else '['}{low}, {high}]"
        raise invalid(f"{param} must be in {bounds}, not {value}", param)


_BIGGEST = 2**31 - 1  # of the wire's integers that we fill


def _check_sampling(request: GenerationRequest) -> None:
    refuse(request)
    _within("n", request.n, 1, MAX_CHOICES)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise _below("max_tokens", request.max_tokens, 1)
    _within("temperature", request.temperature, 0, 100)
    _within("top_p", request.top_p, 0, 1, open_low=True)
    _within("top_k", request.top_k, -1, _BIGGEST)
    _within("min_p", request.min_p, 0, 1)
    _within("repetition_penalty", request.repetition_penalty, 0.01, 100)
    _within("presence_penalty", request.presence_penalty, -2, 2)
    _within("frequency_penalty", request.frequency_penalty, -2, 2)
    _within("min_tokens", request.min_tokens, 0, _BIGGEST)
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f"logit_bias keys must be token ids, not '{key[:40]}'", "logit_bias")
        _within("logit_bias", bias, -100, 100)
    if len(request.stops) > MAX_STOPS:
        raise invalid(f"stop holds {len(request.stops)} strings, at most {MAX_STOPS} are allowed", "stop")
    if not all(request.stops):
        raise invalid("stop strings must not be empty", "stop")


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise invalid("messages must not be empty", "messages")
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if message.get("role") not in ROLES:
            raise invalid(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
        content = message.get("content")
        if content is None and message["role"] != "assistant":  # a misspelt field would be an empty message
            raise invalid(f"{where}.content is missing", f"{where}.content")
        if not isinstance(content, (str, list, type(None))):
            raise invalid(f"{where}.content must be a string or a list of parts", f"{where}.content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
                path = f"{where}.content[{index}]"
                raise invalid(f"{path} must be a part of type 'text' with a string 'text'", path)
