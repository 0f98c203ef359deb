"""Causal attention of a packed batch over paged K and V, in plain torch.

In: the rows of a batch. `PackedBatch` works out, once per batch, where every token's K and V go and
what every row must gather. Then, once per layer, `attend` gathers and runs SDPA for each row.

Invariants: a row reads only slots of its own pages, and only positions up to its own; the result of
a row does not depend on the rows beside it (there is no padding, so no mask that could change bits).
Rows of one batch never share a slot to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch.nn import functional

from engine.batch import Row

Window = int | None  # how many last positions a query sees, itself included; None = all


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row's piece of the packed queries `[first_query, end_query)` and of the gathered keys."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int
    causal: bool  # queries and keys are the same positions, so SDPA's own causal rule is right
    mask: torch.Tensor | None  # bool [queries, keys], True = visible; None where everything is


@dataclass(frozen=True, slots=True)
class Gather:
    """What layers with one window size must gather: int64 `slots` of all rows, and where each row's are."""

    slots: torch.Tensor
    spans: tuple[RowSpan, ...]


class PackedBatch:
    """The rows of one batch, laid one after another: T tokens in all.

    `slots` int64 `[T]`: where K and V of each token go in a flat `[pages * page_size, ...]` view.
    `positions` int64 `[T]`. `sampled` int64: packed indices of the tokens whose logits are wanted.
    """

    def __init__(self, rows: Sequence[Row], page_size: int, pages: int, windows: Iterable[Window]) -> None:
        """Raises `ValueError` for no rows, an empty row, or a page table that is too short or out of range."""
        if not rows:
            raise ValueError("a batch needs at least one row")
        tables = [_slots_of_row(index, row, page_size, pages) for index, row in enumerate(rows)]
        lengths = [len(row.tokens) for row in rows]
        ends = numpy.cumsum(lengths)
        self.tokens = int(ends[-1])
        self.rows = rows
        written = [table[row.start :] for table, row in zip(tables, rows, strict=True)]
        self.slots = torch.from_numpy(numpy.concatenate(written))
        self.positions = torch.from_numpy(
            numpy.concatenate([numpy.arange(row.start, row.start + len(row.tokens)) for row in rows])
        )
        self.sampled = torch.tensor(
            [end - 1 for end, row in zip(ends.tolist(), rows, strict=True) if row.sample is not None],
            dtype=torch.int64,
        )
        self._gathers = {window: _plan(rows, tables, window) for window in set(windows)}

    def token_ids(self) -> torch.Tensor:
        """int64 `[T]`."""
        return torch.tensor([token for row in self.rows for token in row.tokens], dtype=torch.int64)

    def gather(self, window: Window) -> Gather:
        return self._gathers[window]


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, gather: Gather) -> torch.Tensor:
    """Attention of packed `queries` `[T, heads, head_dim]` over one layer's pool.

    `keys` and `values` are flat: `[pages * page_size, kv_heads, head_dim]`, with this batch written.
    Returns `[T, heads * head_dim]`.
    """
    tokens, heads, head_dim = queries.shape
    own_keys = keys.index_select(0, gather.slots).transpose(0, 1).unsqueeze(0)  # [1, kv_heads, all keys, head_dim]
    own_values = values.index_select(0, gather.slots).transpose(0, 1).unsqueeze(0)
    queries = queries.transpose(0, 1).unsqueeze(0)
    grouped = heads != keys.shape[1]
    pieces = []
    for span in gather.spans:
        piece = functional.scaled_dot_product_attention(
            queries[:, :, span.first_query : span.end_query],
            own_keys[:, :, span.first_key : span.end_key],
            own_values[:, :, span.first_key : span.end_key],
            attn_mask=span.mask,
            is_causal=span.causal,
            scale=head_dim**-0.5,
            enable_gqa=grouped,
        )
        pieces.append(piece.squeeze(0).transpose(0, 1))
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return packed.reshape(tokens, heads * head_dim)


def _slots_of_row(index: int, row: Row, page_size: int, pages: int) -> numpy.ndarray:
    """int64 slots of positions 0 .. start + len(tokens) of one row."""
    end = row.start + len(row.tokens)
    if row.start < 0 or not row.tokens:
        raise ValueError(f"row {index} has {len(row.tokens)} tokens from position {row.start}")
    needed = -(-end // page_size)
    if len(row.pages) < needed:
        raise ValueError(f"row {index} reaches position {end - 1} and needs {needed} pages, but has {len(row.pages)}")
    table = numpy.asarray(row.pages[:needed], dtype=numpy.int64)
    if table.min() < 0 or table.max() >= pages:
        raise ValueError(f"row {index} names a page outside 0..{pages - 1}")
    slots: numpy.ndarray = (table[:, None] * page_size + numpy.arange(page_size)).reshape(-1)[:end]
    return slots


def _plan(rows: Sequence[Row], tables: Sequence[numpy.ndarray], window: Window) -> Gather:
    spans, slots, query, key = [], [], 0, 0
    for row, table in zip(rows, tables, strict=True):
        length, end = len(row.tokens), len(table)
        first = 0 if window is None else max(0, row.start - window + 1)  # the first query's oldest visible position
        slots.append(table[first:])
        causal = length > 1 and row.start == 0 and (window is None or end <= window)
        mask = None if causal or length == 1 else _mask(row.start, end, first, window)
        spans.append(RowSpan(query, query + length, key, key + end - first, causal, mask))
        query, key = query + length, key + end - first
    return Gather(torch.from_numpy(numpy.concatenate(slots)), tuple(spans))


def _mask(start: int, end: int, first: int, window: Window) -> torch.Tensor:
    """bool `[end - start, end - first]`: which of the positions from `first` each query from `start` sees."""
    query, key = torch.arange(start, end)[:, None], torch.arange(first, end)[None, :]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)
