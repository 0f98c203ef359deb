"""The compiled matrix product for few rows.

In: float32 weights `[out, in]`, once. Out: products with rows `[T, in]`. Invariant: C is called only with memory that
is as large, as dense and of the type that it takes for granted; whatever is not raises `ValueError` here.
"""

from __future__ import annotations

import ctypes

import torch

from engine.layout import expect
from engine.native.library import load

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class _Product(ctypes.Structure):
    """`Product` of few_rows.c."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "panels", "bias", "out")),
        *((name, _INTEGER) for name in ("rows", "outputs", "inputs", "block")),
    ]  # fmt: skip


class FewRows:
    """`x W^T + b`, summed up in blocks of `block` inputs."""

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None = None, block: int | None = None
    ) -> None:
        """`block`: None for all inputs in one. Raises `ValueError` for weights of another kind."""
        outputs, inputs = weight.shape
        weight = weight.contiguous()
        expect("weights", weight, (outputs, inputs), torch.float32)
        if bias is not None:
            expect("bias", bias, (outputs,), torch.float32)
        if block is not None and block < 1:
            raise ValueError(f"a block of {block} inputs is none")
        library.panel_columns.restype = _INTEGER
        columns = library.panel_columns()
        pack = library.pack_panels
        pack.argtypes, pack.restype = [_POINTER] * 2 + [_INTEGER] * 2, None
        self._multiply = library.multiply_few_rows
        self._multiply.argtypes, self._multiply.restype = [ctypes.POINTER(_Product)], None
        self._panels = torch.empty(-(-outputs // columns) * columns * inputs)
        pack(weight.data_ptr(), self._panels.data_ptr(), outputs, inputs)
        self._bias, self._bias_at = bias, None if bias is None else bias.data_ptr()
        self._block = block or inputs
        self._outputs, self._inputs = outputs, inputs

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        expect("rows", rows, (count, self._inputs), torch.float32)
        out = rows.new_empty(count, self._outputs)
        product = _Product(
            rows.data_ptr(), self._panels.data_ptr(), self._bias_at, out.data_ptr(),
            count, self._outputs, self._inputs, self._block,
        )  # fmt: skip
        self._multiply(product)
        return out


def few_rows(weight: torch.Tensor, bias: torch.Tensor | None = None, block: int | None = None) -> FewRows | None:
    """None where nothing was built, and for other types than float32."""
    library = load() if weight.dtype is torch.float32 and weight.device.type == "cpu" else None
    return None if library is None else FewRows(library, weight, bias, block)
