"""Writes OpenAI-style answers.

In: pieces of output, counts, how it ended. Out: the bytes of a JSON body or of SSE events. Pure.
One `Reply` per request; the parts of a stream's events that never change are encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class Reply(Protocol):
    def opening(self) -> bytes: ...
    def event(self, piece: Piece, finish_reason: str | None, usage: Usage | None) -> bytes: ...
    def usage_event(self, usage: Usage) -> bytes: ...
    def whole(self, pieces: Sequence[Piece], finish_reason: str, usage: Usage) -> bytes: ...


def _frame(head: ReplyHead, object_name: str) -> bytes:
    """The beginning of every event of a stream, up to the choices."""
    fields = {"id": head.id, "object": object_name, "created": head.created, "model": head.model}
    return b"data: " + encode(fields)[:-1] + b',"choices":['


def _close(usage: Usage | None) -> bytes:
    return b"]}\n\n" if usage is None else b'],"usage":' + encode(usage.body()) + b"}\n\n"


class ChatReply:
    def __init__(self, head: ReplyHead, vocabulary: Vocabulary, logprobs: int | None, token_ids: bool) -> None:
        self._head = head
        self._token_ids = token_ids
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._frame = _frame(head, "chat.completion.chunk")

    def opening(self) -> bytes:
        delta = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._frame + delta + b"]}\n\n"

    def event(self, piece: Piece, finish_reason: str | None, usage: Usage | None) -> bytes:
        delta = b'{"content":' + encode(piece.text) + b"}" if piece.text or finish_reason is None else b"{}"
        return b"".join(
            (
                self._frame,
                b'{"index":0,"delta":',
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

    def whole(self, pieces: Sequence[Piece], finish_reason: str, usage: Usage) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces)},
            "logprobs": self._logprob_body(pieces),
            "finish_reason": finish_reason,
        }
        if self._token_ids:
            choice["token_ids"] = _ids(pieces)
        head = self._head
        body = {"id": head.id, "object": "chat.completion", "created": head.created, "model": head.model}
        return encode({**body, "choices": [choice], "usage": usage.body()})

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
        self, head: ReplyHead, vocabulary: Vocabulary, logprobs: int | None, token_ids: bool, echo: str
    ) -> None:
        self._head = head
        self._token_ids = token_ids
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._echo = echo  # the prompt, where the client wants it repeated
        self._frame = _frame(head, "text_completion")

    def opening(self) -> bytes:
        return self.event(Piece(self._echo), None, None) if self._echo else b""

    def event(self, piece: Piece, finish_reason: str | None, usage: Usage | None) -> bytes:
        return b"".join(
            (
                self._frame,
                b'{"index":0,"text":',
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

    def whole(self, pieces: Sequence[Piece], finish_reason: str, usage: Usage) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "text": self._echo + "".join(piece.text for piece in pieces),
            "logprobs": self._logprob_body(pieces),
            "finish_reason": finish_reason,
        }
        if self._token_ids:
            choice["token_ids"] = _ids(pieces)
        head = self._head
        body = {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}
        return encode({**body, "choices": [choice], "usage": usage.body()})

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
