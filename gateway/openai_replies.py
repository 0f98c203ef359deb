"""Writes OpenAI-style answers.

In: pieces of output by choice, counts, how each choice ended. Out: the bytes of a JSON body or of SSE
events. Pure. One `Reply` per request; the parts of a stream's events that never change are encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from gateway.detokenize import Vocabulary
from gateway.errors import ApiError
from gateway.merge import Token
from gateway.output import Piece

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + encode(error.body()) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every answer to a request carries."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int
    completion: int

    def body(self) -> dict[str, int]:
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}


@dataclass(slots=True)
class ChoiceOutput:
    """All that a choice generated, for an answer in one piece."""

    pieces: list[Piece] = field(default_factory=list)
    finish_reason: str = ""


class Reply(Protocol):
    """`index` is the choice's."""

    def opening(self, index: int) -> bytes: ...
    def event(self, index: int, piece: Piece, finish_reason: str | None, usage: Usage | None) -> bytes: ...
    def usage_event(self, usage: Usage) -> bytes: ...
    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes: ...


def _frame(head: ReplyHead, object_name: str) -> bytes:
    """The beginning of every event of a stream, up to the choices."""
    fields = {"id": head.id, "object": object_name, "created": head.created, "model": head.model}
    return b"data: " + encode(fields)[:-1] + b',"choices":['


def _close(usage: Usage | None) -> bytes:
    return b"]}\n\n" if usage is None else b'],"usage":' + encode(usage.body()) + b"}\n\n"


def _whole(head: ReplyHead, object_name: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
    fields = {"id": head.id, "object": object_name, "created": head.created, "model": head.model}
    return encode({**fields, "choices": choices, "usage": usage.body()})


class ChatReply:
    def __init__(self, head: ReplyHead, vocabulary: Vocabulary, logprobs: int | None, token_ids: bool) -> None:
        self._head = head
        self._token_ids = token_ids
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._frame = _frame(head, "chat.completion.chunk")

    def opening(self, index: int) -> bytes:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return self._frame + delta + b"]}\n\n"

    def event(self, index: int, piece: Piece, finish_reason: str | None, usage: Usage | None) -> bytes:
        delta = b'{"content":' + encode(piece.text) + b"}" if piece.text or finish_reason is None else b"{}"
        return b"".join(
            (
                self._frame,
                b'{"index":%d,"delta":' % index,
                delta,
                b',"logprobs":',
                encode(self._logprob_body([piece])),
                b',"finish_reason":',
                encode(finish_reason),
                b',"token_ids":' + encode(_ids([piece])) if self._token_ids else b"",
                b"}",
                _close(usage),
            )
        )

    def usage_event(self, usage: Usage) -> bytes:
        return self._frame + _close(usage)

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        bodies = [self._choice_body(index, choice) for index, choice in enumerate(choices)]
        return _whole(self._head, "chat.completion", bodies, usage)

    def _choice_body(self, index: int, choice: ChoiceOutput) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in choice.pieces)},
            "logprobs": self._logprob_body(choice.pieces),
            "finish_reason": choice.finish_reason,
        }
        return body | {"token_ids": _ids(choice.pieces)} if self._token_ids else body

    def _logprob_body(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self._logprobs is None or not any(piece.tokens for piece in pieces):
            return None
        return {"content": [self._token_body(token) for piece in pieces for token in piece.tokens]}

    def _token_body(self, token: Token) -> dict[str, Any]:
        top = [self._entry(token_id, logprob) for token_id, logprob in token.top[: self._logprobs]]
        return {**self._entry(token.id, token.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self._vocabulary.raw_bytes(token_id)
        return {"token": _name(raw, ""), "logprob": logprob, "bytes": list(raw)}


class CompletionReply:
    def __init__(
        self, head: ReplyHead, vocabulary: Vocabulary, logprobs: int | None, token_ids: bool, echoes: Sequence[str]
    ) -> None:
        self._head = head
        self._token_ids = token_ids
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._echoes = echoes  # the prompt of each choice, where the client wants it repeated; else ""
        self._frame = _frame(head, "text_completion")

    def opening(self, index: int) -> bytes:
        echo = self._echoes[index]
        return self.event(index, Piece(echo), None, None) if echo else b""

    def event(self, index: int, piece: Piece, finish_reason: str | None, usage: Usage | None) -> bytes:
        return b"".join(
            (
                self._frame,
                b'{"index":%d,"text":' % index,
                encode(piece.text),
                b',"logprobs":',
                encode(self._logprob_body([piece])),
                b',"finish_reason":',
                encode(finish_reason),
                b',"token_ids":' + encode(_ids([piece])) if self._token_ids else b"",
                b"}",
                _close(usage),
            )
        )

    def usage_event(self, usage: Usage) -> bytes:
        return self._frame + _close(usage)

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> bytes:
        bodies = [self._choice_body(index, choice) for index, choice in enumerate(choices)]
        return _whole(self._head, "text_completion", bodies, usage)

    def _choice_body(self, index: int, choice: ChoiceOutput) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "text": self._echoes[index] + "".join(piece.text for piece in choice.pieces),
            "logprobs": self._logprob_body(choice.pieces),
            "finish_reason": choice.finish_reason,
        }
        return body | {"token_ids": _ids(choice.pieces)} if self._token_ids else body

    def _logprob_body(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        tokens = [token for piece in pieces for token in piece.tokens]
        if self._logprobs is None or not tokens:
            return None
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [offset for piece in pieces for offset in piece.offsets],
        }

    def _top(self, token: Token) -> dict[str, float]:
        top = {self._name(token_id): logprob for token_id, logprob in token.top[: self._logprobs]}
        if token.logprob is not None:
            top.setdefault(self._name(token.id), token.logprob)  # OpenAI always lists the chosen one
        return top

    def _name(self, token_id: int) -> str:
        return _name(self._vocabulary.raw_bytes(token_id), "bytes:")


def _ids(pieces: Sequence[Piece]) -> list[int]:
    """vLLM's extension: the ids of the output tokens, the ending one included."""
    return [token.id for piece in pieces for token in piece.tokens]


def _name(raw: bytes, prefix: str) -> str:
    """A token as text; one that is only part of a character by its bytes, as OpenAI writes it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
