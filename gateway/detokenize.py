"""Turns output tokens into text as they come.

In: token ids, one at a time. Out: pieces of text whose concatenation (with the last `flush`)
equals decoding all ids at once without special tokens. Pure. A piece never ends inside a
character; the work per token does not grow with the length of the output.

Two ways, because decoders differ. Byte-level BPE (GPT-2 and nearly all newer models) maps each
token to bytes whatever stands around it, so bytes can be fed to an incremental UTF-8 decoder.
Other decoders look at neighbours (leading spaces, byte fallback), so a short window of tokens is
decoded again at each step.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from tokenizers import Tokenizer, decoders


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Vocabulary:
    """What a tokenizer's tokens mean as bytes and as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        # Compared by content, as the tokenizer does when it skips special tokens.
        self._special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        self._bytes: dict[int, bytes] = {}

    def adds_nothing(self, token_id: int) -> bool:
        """Special and unknown tokens have no text in the output."""
        token = self._tokenizer.id_to_token(token_id)
        return token is None or token in self._special

    def shown_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the output; none for special and unknown tokens. Byte-level only."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = b"" if token is None or self.adds_nothing(token_id) else _spell(token)
            self._bytes[token_id] = known
        return known

    def raw_bytes(self, token_id: int) -> bytes:
        """The bytes that spell a token by itself, special ones included (for log-probabilities)."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._special:
            return token.encode()
        if self.byte_level:
            return self.shown_bytes(token_id)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self) -> Detokenizer:
        return ByteLevelDetokenizer(self) if self.byte_level else WindowDetokenizer(self)


def _spell(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token outside the alphabet stands for itself
        return token.encode()


class ByteLevelDetokenizer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._shown_bytes = vocabulary.shown_bytes
        # "replace" puts one U+FFFD per maximal broken part, as the tokenizer's own lossy decoding does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._shown_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


# A character has at most four bytes; a longer run of broken text will not mend.
_MAX_HELD = 32


class WindowDetokenizer:
    """Decodes the tokens since the last settled place, with the group before it as context."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text was shown
        self._context_text = ""

    def push(self, token_id: int) -> str:
        if self._vocabulary.adds_nothing(token_id):
            return ""  # decoding skips it too, and an endless row of them must not fill the window
        self._window.append(token_id)
        text = self._vocabulary.decode(self._window)
        if len(text) <= len(self._context_text):
            return ""
        # Bytes of an unfinished character decode to U+FFFD: wait for the rest of it.
        if text.endswith("\ufffd") and len(self._window) - self._context < _MAX_HELD:
            return ""
        return self._settle(text)

    def flush(self) -> str:
        return self._settle(self._vocabulary.decode(self._window))

    def _settle(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._context_text = self._vocabulary.decode(self._window)
        return piece
