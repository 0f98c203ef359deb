"""The one place where weight matrices are multiplied, so that a row's bits depend on that row alone.

In: rows `[T, in]`. Out: rows `[T, out]`, `x W^T + b`. Every projection of a stage, the output head included, is a
`Linear`. Weights are packed once into the layout that oneDNN computes with; a plain `functional.linear` packs some
of them at every call.

Which kernel a library picks depends on the number of rows, and kernels add up in different orders. So the rows of a
call are padded and cut to numbers for which it picks one kernel. Which numbers those are belongs to the processor
and the build of the library: `probe` finds out, for every shape, at the start of a process.

A step of decode has few rows, and costs what reading the weights costs. For those there is a product of our own
(`engine/native/few_rows.c`), on a second copy of the weights, as long as it is found to have the library's bits.

Invariant, where rows are classed: the bits of an output row are the same for any number of rows in the call and any
place among them. One thread per process is part of it: with more, the work is split by the number of rows.
"""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.native.few_rows import FewRows, few_rows

log = logging.getLogger(__name__)

Multiply = Callable[[torch.Tensor], torch.Tensor]
_PACKED = (torch.float32, torch.bfloat16)  # what oneDNN packs for a processor
_CAN_PACK = torch.backends.mkldnn.is_available() and platform.machine() == "x86_64"  # where it has been tried


class NotInvariant(RuntimeError):
    """No way was found to multiply by weights of this shape such that rows do not depend on each other."""


@dataclass(frozen=True, slots=True)
class RowClass:
    """Calls have at least `least` rows, padded with zeros, and at most `most` (0: any number)."""

    least: int
    most: int


# Tried in this order, the cheapest first; the last is a tile of one size for everything.
ROW_CLASSES = (RowClass(1, 0), RowClass(2, 0), RowClass(16, 0), RowClass(64, 256), RowClass(64, 64))

# Around the sizes at which libraries change kernels, tiles or blocks, up to more rows than a tick has.
_PROBED = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64)
_PROBED_SMALL = (65, 96, 127, 128, 129, 192, 255, 256, 257, 384, 512, 513, 1024)
# From here on (elements of an output head) more rows in a call gain nothing, and probing them would take seconds.
_LARGE = 2**24
_MOST_OF_LARGE = 64

FEW = 16  # rows up to which our own product is the faster one
# Of how many inputs a library may make its partial sums; all of them are tried first.
_BLOCKS = (1024, 512, 768, 384, 256, 192, 128, 64)


class Linear:
    """`y = x W^T + b`, with W `[out, in]` and b `[out]` in the model dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, exact: bool) -> None:
        """`exact`: rows are classed; otherwise their bits are left to the library. Raises `NotInvariant`."""
        outputs, inputs = weight.shape
        self._multiply = _packed(weight, bias)
        self._rows = row_class(outputs, inputs, weight.dtype, bias is not None) if exact else None
        self._few: FewRows | None = None
        if exact and weight.numel() < _LARGE and (block := sum_block(outputs, inputs, weight.dtype)):
            self._few = few_rows(weight, bias, block)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._few is not None and len(rows) <= FEW:
            return self._few(rows)
        return self._multiply(rows) if self._rows is None else in_class(self._multiply, self._rows, rows)


@functools.cache
def row_class(outputs: int, inputs: int, dtype: torch.dtype, biased: bool) -> RowClass:
    """The class of weights of this shape in this process. Takes some tenths of a second when asked first.

    Raises `NotInvariant`.
    """
    weight = _cancelling(outputs, inputs, 1).to(dtype)
    found = probe(_packed(weight, torch.zeros(outputs, dtype=dtype) if biased else None), weight)
    if found.least != ROW_CLASSES[0].least:
        log.info("weights [%d, %d] in %s are multiplied in calls of %s", outputs, inputs, dtype, found)
    return found


@functools.cache
def sum_block(outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """How many inputs the library adds up at once in products with weights of this shape; 0 if that was not found, or
    nothing was built that could do the same. Raises `NotInvariant`."""
    weight = _cancelling(outputs, inputs, 1).to(dtype)
    rows = _cancelling(FEW + 8, inputs, -1).to(dtype)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(3)).to(dtype)
    for block in (inputs, *(block for block in _BLOCKS if block < inputs)):
        if _alike(few_rows(weight, None, block), weight, None, rows) and _alike(
            few_rows(weight, bias, block), weight, bias, rows
        ):
            return block
    if few_rows(weight) is not None:
        log.info("weights [%d, %d] in %s: no order of adding has the library's bits", outputs, inputs, dtype)
    return 0


def _alike(few: FewRows | None, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor) -> bool:
    known = row_class(*weight.shape, weight.dtype, bias is not None)
    return few is not None and torch.equal(few(rows), in_class(_packed(weight, bias), known, rows))


def probe(multiply: Multiply, weight: torch.Tensor) -> RowClass:
    """The first of `ROW_CLASSES` in which `multiply`, by `weight` `[out, in]`, keeps the bits of rows.

    Raises `NotInvariant` if there is none.
    """
    large = weight.numel() >= _LARGE
    counts = _PROBED if large else _PROBED + _PROBED_SMALL
    rows = _cancelling(counts[-1], weight.shape[1], -1).to(weight.dtype)
    for candidate in ROW_CLASSES:
        if large:
            candidate = RowClass(candidate.least, _MOST_OF_LARGE)
        if _keeps_bits(multiply, candidate, rows, counts):
            return candidate
    raise NotInvariant(
        f"multiplying by weights {list(weight.shape)} in {weight.dtype} with {torch.get_num_threads()} threads gives "
        f"rows whose bits depend on the other rows of a call, in every way that was tried; set OMP_NUM_THREADS=1"
    )


def _cancelling(count: int, width: int, sign: int) -> torch.Tensor:
    """float32 `[count, width]` such that rows of one sign times rows of the other sum up to zero: what a computer gets
    is the errors of its rounding, so another order of adding shows, even where results are rounded to few bits."""
    half = width // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(1))
    first = torch.randn(count, half, generator=torch.Generator().manual_seed(2 + sign))
    return torch.cat((first, sign * first[:, order], torch.zeros(count, width - 2 * half)), dim=1)


def in_class(multiply: Multiply, allowed: RowClass, rows: torch.Tensor) -> torch.Tensor:
    """`multiply(rows)`, in calls of the sizes that are `allowed`."""
    count = len(rows)
    if allowed.most and count > allowed.most:
        return torch.cat([in_class(multiply, allowed, part) for part in rows.split(allowed.most)])
    if count >= allowed.least:
        return multiply(rows)
    return multiply(functional.pad(rows, (0, 0, 0, allowed.least - count)))[:count]


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    if weight.device.type != "cpu" or weight.dtype not in _PACKED or not _CAN_PACK:
        return lambda rows: functional.linear(rows, weight, bias)
    layout = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def apply(rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(rows, layout, bias, "none", [], "")
        return result

    return apply


def _keeps_bits(multiply: Multiply, candidate: RowClass, rows: torch.Tensor, counts: Sequence[int]) -> bool:
    """Whether every number of rows, from the first and up to the last, gives what all of them give."""
    expected = in_class(multiply, candidate, rows)
    return all(
        torch.equal(in_class(multiply, candidate, rows[part]), expected[part])
        for count in counts
        for part in (slice(0, count), slice(len(rows) - count, len(rows)))
    )
