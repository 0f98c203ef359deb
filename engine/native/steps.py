"""The compiled steps of a layer that take each row by itself: normalization, the gate of an MLP, rotation.

In: tensors of the model's type on the CPU. Out: fresh tensors, or what is said to be written. Invariant: C is called
only with memory that is as large, as dense and of the type that it takes for granted; whatever is not raises
`ValueError` here. Slots are trusted: a `PackedBatch` has checked them against the pool that they are for.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from engine.layout import expect
from engine.native.library import DTYPES, load

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "normalize": [_POINTER] * 3 + [_INTEGER] * 4 + [ctypes.c_float, _INTEGER],
    "gate": [_POINTER] * 2 + [_INTEGER] * 3,
    "rotate_and_keep": [_POINTER] * 6 + [_INTEGER] * 5,
}


class Steps:
    """layer_steps.c of one loaded build."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._normalize, self._gate, self._rotate = library.normalize, library.gate, library.rotate_and_keep

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / rms(x) * weight` over the last dimension of x `[T, width]`, or `[T, groups, width]` where groups lie
        together."""
        rows, width = len(x), x.shape[-1]
        groups = x.shape[1] if x.dim() == 3 else 1
        if x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != width) or x.dim() not in (2, 3):
            raise ValueError(f"rows to normalize must lie together; {list(x.shape)} has strides {x.stride()}")
        expect("weights of a norm", weight, (width,), x.dtype)
        out = x.new_empty(x.shape)
        self._normalize(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, groups, x.stride(0), width, eps, _is_bfloat16(x)
        )  # fmt: skip
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` `[T, width]` of `[T, 2 * width]`, gate first."""
        rows, both = gate_up.shape
        expect("gate and up", gate_up, (rows, both // 2 * 2), gate_up.dtype)
        out = gate_up.new_empty(rows, both // 2)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, both // 2, _is_bfloat16(gate_up))
        return out

    def rotate_and_keep(
        self,
        heads: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Rotates queries and keys of `heads` `[T, queries + 2 * kv_heads, head_dim]` (queries, keys, values) and puts
        keys and values into the flat pool `[slots, kv_heads, head_dim]` at `slots` int64 `[T]`.

        `rotation`: cosines and sines `[T, 1, head_dim]`. Returns the queries `[T, queries, head_dim]`, a view of
        `heads`, which was written to.
        """
        tokens, _, head_dim = heads.shape
        kv_heads = keys.shape[1]
        queries = heads.shape[1] - 2 * kv_heads
        cosines, sines = rotation
        if queries < 1 or head_dim % 2:
            raise ValueError(f"{list(heads.shape)} is no shape of queries and {kv_heads} KV heads")
        expect("heads", heads, tuple(heads.shape), heads.dtype)
        expect("slots", slots, (tokens,), torch.int64)
        for name, tensor in (("cosines", cosines), ("sines", sines)):
            expect(name, tensor, (tokens, 1, head_dim), heads.dtype)
        for name, tensor in (("keys", keys), ("values", values)):
            expect(name, tensor, (len(keys), kv_heads, head_dim), heads.dtype)
        self._rotate(
            heads.data_ptr(), cosines.data_ptr(), sines.data_ptr(), slots.data_ptr(), keys.data_ptr(),
            values.data_ptr(), tokens, queries, kv_heads, head_dim, _is_bfloat16(heads),
        )  # fmt: skip
        return heads[:, :queries]


def steps(dtype: torch.dtype) -> Steps | None:
    """The compiled steps for this type, or None: then torch does them."""
    return _steps() if dtype in DTYPES else None


@functools.cache
def _steps() -> Steps | None:
    library = load()
    return Steps(library) if library is not None else None


def _is_bfloat16(x: torch.Tensor) -> bool:
    return x.dtype is torch.bfloat16
