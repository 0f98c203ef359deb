"""The compiled attention kernel: which of its builds this processor runs, and the one call into it.

In: tensors, and the arrays of a batch. Out: attention in a fresh tensor. Invariant: C is called only with memory
that is as large, as dense and of the type that it takes for granted; whatever is not raises `ValueError` here.
The call holds no lock of the interpreter and uses the one thread that makes it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from pathlib import Path

import torch

from engine.layout import Layout, expect
from engine.native.build import Variant, variants

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
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
    """One build of paged_attention.c, loaded."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if it cannot be loaded."""
        self._call = ctypes.CDLL(str(path)).paged_attention
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


def runnable() -> list[Variant]:
    """The variants that this processor can run, the fastest first, built or not."""
    features = _processor_features()
    return [variant for variant in variants() if variant.needs <= features]


@functools.cache
def best() -> Kernel | None:
    """The fastest that was built and runs here; None, with one line in the log, if there is none."""
    for variant in runnable():
        if variant.path().exists():
            try:
                kernel = Kernel(variant.path())
            except OSError as error:
                log.warning("the attention kernel %s cannot be loaded: %s", variant.path(), error)
                continue
            log.info("attention runs in the compiled kernel, variant %s", variant.name)
            return kernel
    log.warning(
        "the compiled attention kernel is missing in %s; attention runs in plain torch, many times slower: "
        "run `make setup`, or `python -m engine.native.build` where there is a C compiler",
        variants()[0].path().parent,
    )
    return None


def _processor_features() -> frozenset[str]:
    """What the processor can do, by the names of /proc/cpuinfo; nothing where there is none."""
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
