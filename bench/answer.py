"""What a streamed answer says, event by event. Pure; moments are handed in.

In: the data of the events of one stream, each with the moment it was read. Out: how many tokens came at which
moment, the counts of the server's usage, and what was wrong. How many tokens an event brought is taken from, in this
order: the growth of `usage.completion_tokens` (`continuous_usage_stats`), the length of `token_ids`, or 1 if it
has text. The last usage corrects the total, never the moments.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class StreamedAnswer:
    def __init__(self) -> None:
        self.chunks: list[tuple[float, int]] = []  # (moment, tokens) of each event that brought tokens
        self.counted = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None  # as the server says
        self.finish_reason = ""
        self.error = ""  # as the server says in the stream
        self.done = False  # [DONE] was seen

    def push(self, data: bytes, at: float) -> None:
        """Raises `ValueError` if the data is not what such servers send."""
        if data == DONE:
            self.done = True
            return
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ValueError(f"an event is not JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise ValueError(f"an event is no object: {data[:80]!r}")
        if "error" in event:
            told = event["error"]
            self.error = str(told.get("message", told) if isinstance(told, dict) else told)
            return
        usage = event.get("usage") or {}
        choices = event.get("choices") or ()
        tokens = sum(_tokens(choice) for choice in choices)
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.output_tokens = usage.get("completion_tokens", self.output_tokens)
            if choices and self.output_tokens is not None:
                tokens = max(0, self.output_tokens - self.counted)
        if tokens:
            self.chunks.append((at, tokens))
            self.counted += tokens
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def tokens(self) -> int:
        return self.counted if self.output_tokens is None else self.output_tokens


def _tokens(choice: dict[str, Any]) -> int:
    if choice.get("token_ids"):
        return len(choice["token_ids"])
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return 1 if text else 0
