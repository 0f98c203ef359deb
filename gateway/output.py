"""Turns merged tokens into what a client may see: text, log-probabilities, counts.

In: tokens in order, then the end. Out: `Piece`s. Pure. The concatenated text is that of all
tokens up to the end or the first stop string; the token that ends a request (end-of-sequence or
one of its stop ids) is counted but not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.detokenize import Detokenizer, Vocabulary
from gateway.merge import Token
from gateway.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    # Tokens told since the last piece, with the place of each in the text before stop strings are cut.
    tokens: Sequence[Token] = ()
    offsets: Sequence[int] = ()


@dataclass(slots=True)
class Output:
    """The output of one request as far as it is known."""

    vocabulary: Vocabulary
    stops: Sequence[str]
    min_tokens: int  # before so many tokens nothing stops the request, stop strings included
    ending_ids: Sequence[int]  # ids that end the request when sampled
    count: int = 0
    stopped: bool = False  # by a stop string: nothing after it counts
    _offset: int = 0
    _detokenizer: Detokenizer = field(init=False)
    _stop_strings: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = self.vocabulary.detokenizer()
        self._stop_strings = StopStrings(self.stops)

    def push(self, tokens: Iterable[Token]) -> Piece:
        texts: list[str] = []
        told: list[Token] = []
        offsets: list[int] = []
        for token in tokens:
            if self.stopped:
                break
            self.count += 1
            told.append(token)
            offsets.append(self._offset)
            ends = self.count > self.min_tokens and token.id in self.ending_ids
            text = "" if ends else self._detokenizer.push(token.id)
            if text:
                self._offset += len(text)
                texts.append(self._show(text))
        return Piece("".join(texts), told, offsets)

    def finish(self) -> Piece:
        """The request has ended: what was held back is shown, unless it completes a stop string."""
        if self.stopped:
            return Piece("")
        text = self._show(self._detokenizer.flush())
        return Piece(text if self.stopped else text + self._stop_strings.flush())

    def _show(self, text: str) -> str:
        if self.count <= self.min_tokens:
            return text
        shown = self._stop_strings.push(text)
        self.stopped = self._stop_strings.stopped
        return shown
