"""Shows how the parts of a cluster come up: one line per part, rewritten in place on a terminal.

In: (name, text) whenever something changed. Out: lines on a stream. Where the stream is no terminal,
a part gets a new line only when its phrase changes in more than its numbers, or a quarter of loading
is done.
"""

from __future__ import annotations

import re
import shutil
from typing import TextIO


class Progress:
    def __init__(self, names: list[str], stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty()
        self.width = max(map(len, names), default=0)
        self.lines = dict.fromkeys(names, "waiting")
        self._drawn = 0
        self._said: dict[str, str] = {}

    def show(self, name: str, text: str) -> None:
        if self.lines.get(name) == text:
            return
        self.lines[name] = text
        if self.live:
            self._draw()
        elif self._said.get(name) != (gist := _gist(text)):
            self._said[name] = gist
            self._print(f"{name:<{self.width}}  {text}")

    def say(self, line: str) -> None:
        """A line that stays, above those that change."""
        self._erase()
        self._print(line)
        if self.live and self._drawn:
            self._drawn = 0
            self._draw()

    def finish(self) -> None:
        """From now on everything is a line that stays."""
        self.live = False
        self._drawn = 0
        self._said = {name: _gist(text) for name, text in self.lines.items()}

    def _draw(self) -> None:
        self._erase()
        room = shutil.get_terminal_size().columns - self.width - 3
        for name, text in self.lines.items():
            self._print(f"{name:<{self.width}}  {text[:room]}")
        self._drawn = len(self.lines)

    def _erase(self) -> None:
        if self.live and self._drawn:
            self.stream.write(f"\x1b[{self._drawn}A\x1b[J")

    def _print(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


def _gist(text: str) -> str:
    """The text without its numbers, except for quarters of a percentage."""
    percent = re.search(r"(\d+) %", text)
    quarter = f" {int(percent[1]) // 25}" if percent else ""
    return re.sub(r"\d+", "#", text) + quarter
