"""Finds stop strings in text that arrives in pieces.

In: pieces of text. Out: the text that may be shown, and whether a stop string was found. Pure.
The result does not depend on where the pieces are cut: the stop string that is complete first
wins (of those complete at the same place, the longest), and text is shown only once it cannot be
the beginning of a stop string any more.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    def __init__(self, stops: Sequence[str] = ()) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Returns the text that became showable. After a stop string was found that is never any more."""
        if self.stopped or not piece:
            return ""
        if not self._stops:
            return piece
        # What was held is a proper prefix of a stop string, so a match can begin nowhere before it.
        text = self._held + piece
        cut = self._first_match(text)
        if cut is not None:
            self.stopped = True
            self._held = ""
            return text[:cut]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """No more text comes: what was held is text like any other."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        best: tuple[int, int] | None = None  # (end, start)
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
