"""Draws the rates as bars, per prompt length. In: figures. Out: SVG."""

from __future__ import annotations

from collections.abc import Sequence

from .figures import Figure
from .measure import CHUNKS, WHOLE
from .pairs import REFERENCE
from .table import NAMES

COLOURS = {WHOLE: "#1a7f37", CHUNKS: "#4ac26b", "engine": "#9a6700"}
REFERENCE_COLOUR, RAW_COLOUR = "#8c959f", "#cf222e"
LEFT, WIDTH, STEP = 400, 340, 22


def plot(found: Sequence[Figure]) -> str:
    most = max(figure.bytes_per_second for figure in found)
    parts: list[str] = []
    y = 24
    for tokens in dict.fromkeys(figure.tokens for figure in found):
        y += 12
        parts.append(f'<text x="16" y="{y}" font-size="15">{tokens} positions, GB/s</text>')
        for figure in (figure for figure in found if figure.tokens == tokens):
            y += STEP
            length = WIDTH * figure.bytes_per_second / most
            parts.append(
                f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{figure.backend}: {NAMES[figure.method]}</text>'
            )
            parts.append(
                f'<rect x="{LEFT}" y="{y - 13}" width="{length:.1f}" height="16" fill="{_colour(figure)}"/>'
                f'<text x="{LEFT + length + 6:.1f}" y="{y}">{figure.bytes_per_second / 1e9:.2f}</text>'
            )
        y += STEP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {y}" font-family="sans-serif" font-size="13">'
        f'<rect width="800" height="{y}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _colour(figure: Figure) -> str:
    if figure.backend == REFERENCE:
        return REFERENCE_COLOUR
    return COLOURS.get(figure.method, RAW_COLOUR)
