"""Causal attention of a packed batch over paged K and V.

In: the rows of a batch. `PackedBatch` works out, once per batch, where every token's K and V go and where every
row's are. Then, once per layer, `attend` runs the compiled kernel of `engine.native`; where it was not built, and
for float16, plain torch, many times slower.

Invariants: a row reads only slots of its own pages, and only positions that its tokens see. The bits of a token's
result depend on its own query, keys and values alone: not on the rows beside it, nor on pages, page size or how
its prompt was cut up. Rows of one batch never share a slot to write.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch.nn import functional

from engine.batch import Row
from engine.layout import Layout, Window
from engine.native import kernel
from engine.native.library import DTYPES


class PackedBatch:
    """The rows of one batch, laid one after another: T tokens in all.

    `slots` int64 `[T]`: where K and V of each token go in a flat `[pages * page_size, ...]` view.
    `positions` int64 `[T]`. `sampled` int64: packed indices of the tokens whose logits are wanted.
    """

    def __init__(self, rows: Sequence[Row], page_size: int, pages: int) -> None:
        """Raises `ValueError` for no rows, an empty row, or a page table that is too short or out of range."""
        if not rows:
            raise ValueError("a batch needs at least one row")
        lengths = [len(row.tokens) for row in rows]
        ends = [row.start + length for row, length in zip(rows, lengths, strict=True)]
        tables = _page_tables(rows, ends, page_size, pages)
        self.rows = rows
        offsets = numpy.concatenate(([0], numpy.cumsum(lengths, dtype=numpy.int64)))
        self.tokens = int(offsets[-1])
        positions = numpy.concatenate([numpy.arange(row.start, end) for row, end in zip(rows, ends, strict=True)])
        owners = numpy.repeat(numpy.arange(len(rows)), lengths)
        own_pages = tables[owners, positions // page_size].astype(numpy.int64)
        self.slots = torch.from_numpy(own_pages * page_size + positions % page_size)
        self.positions = torch.from_numpy(positions)
        asking = [index for index, row in enumerate(rows) if row.sample is not None]
        self.sampled = torch.from_numpy(offsets[1:][asking] - 1)
        self._arrays = torch.from_numpy(tables), torch.from_numpy(offsets), torch.tensor(ends)
        self._of_sampled = (
            torch.from_numpy(tables[asking]), torch.arange(len(asking) + 1), self._arrays[2][asking]
        )  # fmt: skip
        self._pool = page_size, pages
        self._layouts: dict[tuple[Window, bool], Layout] = {}

    def token_ids(self) -> torch.Tensor:
        """int64 `[T]`."""
        return torch.tensor([token for row in self.rows for token in row.tokens], dtype=torch.int64)

    def layout(self, window: Window, sampled_only: bool = False) -> Layout:
        """What layers with this window read, for all tokens or for the sampled ones alone; made when asked first."""
        if (window, sampled_only) not in self._layouts:
            arrays = self._of_sampled if sampled_only else self._arrays
            tokens = len(self.sampled) if sampled_only else self.tokens
            self._layouts[window, sampled_only] = Layout(*arrays, *self._pool, tokens, window)
        return self._layouts[window, sampled_only]


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Attention of packed `queries` `[T, heads, head_dim]` over one layer's pool.

    `keys` and `values` are flat: `[pages * page_size, kv_heads, head_dim]`, with this batch written.
    Returns `[T, heads * head_dim]`.
    """
    compiled = kernel.best() if queries.dtype in DTYPES else None
    return (compiled or attend_in_torch)(queries, keys, values, layout)


def attend_in_torch(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`attend`, one token at a time: a library's sums depend on the shape of what it is given and on how its memory
    is aligned, so here both follow from the token's own position alone."""
    tokens, heads, head_dim = queries.shape
    out = queries.new_empty(tokens, heads * head_dim)
    within = torch.arange(layout.page_size)
    lengths, first_query = layout.lengths.tolist(), layout.first_query.tolist()
    for request, length in enumerate(lengths):
        slots = (layout.pages[request].long()[:, None] * layout.page_size + within).reshape(-1)
        for token in range(first_query[request], first_query[request + 1]):
            end = length - first_query[request + 1] + token + 1
            seen = slots[0 if layout.window is None else max(0, end - layout.window) : end]
            attended = functional.scaled_dot_product_attention(
                queries[token].float().clone()[None, :, None],
                keys.index_select(0, seen).float().transpose(0, 1)[None],
                values.index_select(0, seen).float().transpose(0, 1)[None],
                scale=head_dim**-0.5,
                enable_gqa=heads != keys.shape[1],
            )
            out[token] = attended.reshape(-1)
    return out


def _page_tables(rows: Sequence[Row], ends: Sequence[int], page_size: int, pages: int) -> numpy.ndarray:
    """int32 `[rows, most pages of a row]`: the pages of positions 0 .. end of each row, then zeros."""
    counts = [-(-end // page_size) for end in ends]
    tables = numpy.zeros((len(rows), max(counts)), dtype=numpy.int32)
    for index, (row, end, count) in enumerate(zip(rows, ends, counts, strict=True)):
        if row.start < 0 or not row.tokens:
            raise ValueError(f"row {index} has {len(row.tokens)} tokens from position {row.start}")
        if len(row.pages) < count:
            raise ValueError(
                f"row {index} reaches position {end - 1} and needs {count} pages, but has {len(row.pages)}"
            )
        own = numpy.asarray(row.pages[:count], dtype=numpy.int64)
        if own.min() < 0 or own.max() >= pages:
            raise ValueError(f"row {index} names a page outside 0..{pages - 1}")
        tables[index, :count] = own
    return tables
