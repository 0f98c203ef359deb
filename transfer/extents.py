"""Page lists to runs of tokens.

In: the pages a prompt has on either side, and a range of its positions.
Out: the fewest (source offset, destination offset, length) runs, in tokens of the
pool, in order of position. Neighbours merge only where both sides are contiguous.
Invariants: the runs cover exactly [start, end), so a last partial page moves only
its tokens. A side that has too few pages is an error, never a shorter transfer:
stopping at the shorter list is how KV gets lost without a trace.
"""

from __future__ import annotations

from collections.abc import Sequence

Extent = tuple[int, int, int]  # source token offset, destination token offset, tokens


class ExtentsError(ValueError):
    """Page lists that cannot carry the asked positions."""


Span = tuple[int, int]  # token offset, tokens


def spans(pages: Sequence[int], start: int, end: int, page_size: int) -> list[Span]:
    """Where the positions [start, end) lie, page by page: the units of a checksum, the same on both sides."""
    found = []
    while start < end:
        page, within = divmod(start, page_size)
        tokens = min(page_size - within, end - start)
        found.append((pages[page] * page_size + within, tokens))
        start += tokens
    return found


def extents(src_pages: Sequence[int], dst_pages: Sequence[int], start: int, end: int, page_size: int) -> list[Extent]:
    if not 0 <= start <= end:
        raise ExtentsError(f"positions [{start}, {end}) are no range")
    if len(src_pages) > len(dst_pages):
        raise ExtentsError(f"{len(src_pages)} source pages do not fit {len(dst_pages)} destination pages")
    if end > len(src_pages) * page_size:
        raise ExtentsError(f"position {end} lies beyond {len(src_pages)} pages of {page_size}")
    runs: list[Extent] = []
    position = start
    while position < end:
        page, within = divmod(position, page_size)
        tokens = min(page_size - within, end - position)
        src = src_pages[page] * page_size + within
        dst = dst_pages[page] * page_size + within
        if runs and runs[-1][0] + runs[-1][2] == src and runs[-1][1] + runs[-1][2] == dst:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + tokens)
        else:
            runs.append((src, dst, tokens))
        position += tokens
    return runs
