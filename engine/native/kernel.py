"""The compiled attention kernel.

In: tensors, and the arrays of a batch. Out: attention in a fresh tensor. Invariant: C is called only with memory
that is as large, as dense and of the type that it takes for granted; whatever is not raises `ValueError` here.
The call holds no lock of the interpreter and uses the one thread that makes it.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from engine.layout import Layout, expect
from engine.native.library import DTYPES, load

EVERYTHING = 2**62  # a window that no position leaves


class _Batch(ctypes.Structure):
    """`Batch` of paged_attention.c."""

    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("first_query", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("requests", ctypes.c_int64),
        ("pages_per_request", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
    ]


class _Tensors(ctypes.Structure):
    """`Tensors` of paged_attention.c."""

    _fields_ = [
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("bfloat16", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


class Kernel:
    """paged_attention.c of one loaded build."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.paged_attention
        self._call.argtypes = [ctypes.POINTER(_Batch), ctypes.POINTER(_Tensors)]
        self._call.restype = ctypes.c_int

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Attention `[T, heads * head_dim]` of packed queries `[T, heads, head_dim]` over the pool's flat keys and
        values `[slots, kv_heads, head_dim]`. Raises `ValueError` for tensors that do not fit each other or `layout`."""
        tokens, heads, head_dim = queries.shape
        kv_heads = keys.shape[1]
        if queries.dtype not in DTYPES or queries.device.type != "cpu":
            raise ValueError(f"the kernel takes float32 and bfloat16 on CPUs, not {queries.dtype} on {queries.device}")
        if tokens != layout.tokens or head_dim < 1 or kv_heads < 1 or heads < 1 or heads % kv_heads:
            raise ValueError(f"queries {list(queries.shape)} do not fit {layout.tokens} tokens and {kv_heads} KV heads")
        if queries.stride(2) != 1 or queries.stride(1) != head_dim or queries.stride(0) < heads * head_dim:
            raise ValueError(f"the heads of a token must lie together; the queries' strides are {queries.stride()}")
        for name, tensor in (("keys", keys), ("values", values)):
            expect(name, tensor, (layout.pages_in_pool * layout.page_size, kv_heads, head_dim), queries.dtype)
        out = queries.new_empty(tokens, heads * head_dim)
        tensors = _Tensors(
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            queries.stride(0),
            heads,
            kv_heads,
            head_dim,
            queries.dtype is torch.bfloat16,
            head_dim**-0.5,
        )
        batch = _Batch(
            layout.pages.data_ptr(),
            layout.first_query.data_ptr(),
            layout.lengths.data_ptr(),
            len(layout.lengths),
            layout.pages.shape[1],
            layout.page_size,
            EVERYTHING if layout.window is None else layout.window,
        )
        if self._call(batch, tensors):
            raise MemoryError("the attention kernel got no memory to work in")
        return out


@functools.cache
def best() -> Kernel | None:
    """The fastest that was built and runs here, if one does."""
    library = load()
    return Kernel(library) if library is not None else None
