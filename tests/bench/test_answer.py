"""Streams are read right wherever they are cut, and however many tokens an event brings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.answer import StreamedAnswer
from bench.sse import EventReader


def event(text: str | None = None, tokens: int | None = None, **choice: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"choices": [] if text is None else [{"text": text, **choice}]}
    if tokens is not None:
        body["usage"] = {"prompt_tokens": 9, "completion_tokens": tokens}
    return body


def answered(*events: dict[str, Any]) -> StreamedAnswer:
    """The n-th event comes at second n."""
    answer = StreamedAnswer()
    for second, body in enumerate(events):
        answer.push(json.dumps(body).encode(), float(second))
    return answer


STREAM = b'data: {"a":1}\n\n: a comment\ndata:{"b":"\xc3\xa9"}\r\n\r\nevent: x\ndata: line one\ndata: line two\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', '{"b":"é"}'.encode(), b"line one\nline two", b"[DONE]"]


@pytest.mark.parametrize("size", [*range(1, 30), len(STREAM)])
def test_events_are_whole_wherever_the_bytes_are_cut(size: int) -> None:
    reader = EventReader()
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [found for piece in pieces for found in reader.feed(piece)] == EVENTS


@pytest.mark.parametrize("piece", [b"data: aaaaaa", b"data: aaaaaa\n"])
def test_an_event_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    monkeypatch.setattr("bench.sse.LONGEST", 100)
    reader = EventReader()

    def feed_for_ever() -> None:
        for _ in range(20):
            reader.feed(piece)

    with pytest.raises(ValueError, match="longer than 100 bytes"):
        feed_for_ever()


def test_growing_usage_says_how_many_tokens_an_event_brought() -> None:
    answer = answered(event("a", 1), event("bcd", 4), event("", 5, finish_reason="length"))
    assert answer.chunks == [(0.0, 1), (1.0, 3), (2.0, 1)]
    assert (answer.tokens, answer.prompt_tokens, answer.finish_reason) == (5, 9, "length")


def test_token_ids_say_it_without_usage() -> None:
    assert answered(event("a", token_ids=[4, 5]), event("", token_ids=[6])).chunks == [(0.0, 2), (1.0, 1)]


def test_without_both_every_event_with_text_is_one_token_and_the_last_usage_corrects_the_total() -> None:
    answer = answered(event("a"), event("bc"), event("", finish_reason="stop"), event(tokens=4))
    assert answer.chunks == [(0.0, 1), (1.0, 1)]
    assert answer.tokens == 4


def test_a_chat_s_role_is_no_token() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"reasoning_content": "b"}, {}]
    assert answered(*({"choices": [{"delta": delta}]} for delta in deltas)).chunks == [(1.0, 1), (2.0, 1)]


def test_an_error_in_the_stream_is_kept() -> None:
    assert answered(event("a"), {"error": {"message": "gone", "code": 5}}).error == "gone"


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff"])
def test_what_no_such_server_sends_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="an event is"):
        StreamedAnswer().push(data, 0.0)
