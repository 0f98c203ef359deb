"""Pieces of text must add up to the decoding of all tokens, whatever the tokens are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from gateway.detokenize import Detokenizer, Vocabulary, WindowDetokenizer
from gateway.model_files import ModelFiles

HARD = (
    "👩‍👩‍👧‍👦", "🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿", "漢字かな交じり文", "한국어", "हिन्दी क्षत्रिय",
    "e\u0301\u0323n\u0303", "\ufffd", "\u200d", " ", "\n\n", "a",
)  # fmt: skip
TEXTS = st.lists(st.one_of(st.text(max_size=12), st.sampled_from(HARD)), max_size=6).map("".join)


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    """A Llama-2-style decoder: spaces as ▁, bytes as <0xNN>, the first space stripped."""
    words = ["<s>", "▁", "▁a", "b", "▁▁", "é", "漢", "�"]
    vocabulary = {word: i for i, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_text_comes_back_and_equals_transformers(files: ModelFiles, reference: Any, text: str) -> None:
    ids = files.encode(text, add_special_tokens=False)
    got = pieces(files.vocabulary.detokenizer(), ids)
    assert "".join(got) == reference.decode(ids, skip_special_tokens=True)
    assert files.encode(text, add_special_tokens=True) == reference.encode(text)


@given(st.lists(st.integers(0, 49160), max_size=12))
@example([0xC3 + 17, 1, 2])
@settings(max_examples=300, deadline=None)
def test_any_tokens_equal_the_whole_decoded_at_once(vocabulary: Vocabulary, ids: list[int]) -> None:
    assert vocabulary.byte_level
    assert "".join(pieces(vocabulary.detokenizer(), ids)) == vocabulary.decode(ids)
    assert "".join(pieces(WindowDetokenizer(vocabulary), ids)) == vocabulary.decode(ids)


def test_a_piece_never_ends_inside_a_character(files: ModelFiles) -> None:
    text = "x👩‍👩‍👧‍👦 क्षत्रिय"
    ids = files.encode(text, add_special_tokens=False)
    for detokenizer in (files.vocabulary.detokenizer(), WindowDetokenizer(files.vocabulary)):
        shown = pieces(detokenizer, ids)
        assert not any("\ufffd" in piece for piece in shown)
        assert "" in shown, "some character spans tokens, or this test shows nothing"


def test_an_unfinished_character_at_the_end_is_told(files: ModelFiles) -> None:
    ids = files.encode("👩", add_special_tokens=False)[:-1]
    assert "".join(pieces(files.vocabulary.detokenizer(), ids)) == "\ufffd"


@given(st.lists(st.integers(0, 7), max_size=20))
@settings(deadline=None)
def test_decoders_that_look_at_neighbours(sentencepiece_like: Tokenizer, ids: list[int]) -> None:
    vocabulary = Vocabulary(sentencepiece_like)
    assert not vocabulary.byte_level
    assert "".join(pieces(vocabulary.detokenizer(), ids)) == vocabulary.decode(ids)


@given(st.text(max_size=6))
@settings(deadline=None)
def test_byte_fallback(sentencepiece_like: Tokenizer, text: str) -> None:
    vocabulary = Vocabulary(sentencepiece_like)
    ids = [2, *(8 + byte for byte in text.encode()), 3]
    assert "".join(pieces(vocabulary.detokenizer(), ids)) == "a" + text + "b"
    assert b"".join(vocabulary.raw_bytes(token) for token in ids[1:-1]) == text.encode()


def test_endless_rubbish_does_not_fill_the_window(sentencepiece_like: Tokenizer) -> None:
    vocabulary = Vocabulary(sentencepiece_like)
    detokenizer = vocabulary.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    for token in [*[8 + 0xFF] * 500, *[0] * 500]:
        detokenizer.push(token)
    assert len(detokenizer._window) < 100
