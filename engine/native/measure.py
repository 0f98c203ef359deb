"""What the compiled attention kernel costs beside gathering K and V and torch's own attention.

`python -m engine.native.measure [--dtype float32|bfloat16] [--heads 9,3,64] [--seconds 2]`

Out: a table of processor milliseconds of one layer on one thread, the smallest of rounds in which all take turns.
Keys and values lie on scattered pages of 16.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from engine.layout import Layout
from engine.native.kernel import Kernel
from engine.native.library import runnable

PAGE = 16
# Requests, positions of each before this batch, tokens of each in it.
CASES = [(8, 99, 1), (32, 99, 1), (8, 499, 1), (8, 1999, 1), (32, 1999, 1), (1, 0, 512), (1, 2048, 512), (1, 7680, 512)]

Way = Callable[[], torch.Tensor]


def ways(case: tuple[int, int, int], heads: Sequence[int], dtype: torch.dtype) -> dict[str, Way]:
    """The same attention by each way."""
    requests, before, tokens = case
    queries_heads, kv_heads, head_dim = heads
    length = before + tokens
    count = -(-length // PAGE)
    pages = torch.randperm(requests * count).view(requests, count)
    slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).view(requests, -1)[:, :length].reshape(-1)
    keys, values = (torch.randn(requests * count * PAGE, kv_heads, head_dim).to(dtype) for _ in range(2))
    queries = torch.randn(requests * tokens, queries_heads, head_dim).to(dtype)
    layout = Layout(
        pages.int(),
        torch.arange(requests + 1) * tokens,
        torch.full((requests,), length),
        PAGE,
        requests * count,
        requests * tokens,
        None,
    )
    mask = None if tokens == 1 or before == 0 else torch.ones(tokens, length, dtype=torch.bool).tril(before)

    def gathered() -> torch.Tensor:
        own_keys, own_values = (tensor.index_select(0, slots).transpose(0, 1)[None] for tensor in (keys, values))
        pieces = [
            functional.scaled_dot_product_attention(
                queries[row * tokens : (row + 1) * tokens].transpose(0, 1)[None],
                own_keys[:, :, row * length : (row + 1) * length],
                own_values[:, :, row * length : (row + 1) * length],
                attn_mask=mask,
                is_causal=tokens > 1 and mask is None,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for row in range(requests)
        ]
        return torch.cat(pieces).reshape(requests * tokens, -1)

    made: dict[str, Way] = {"torch": gathered}
    for variant in runnable():
        if variant.path().exists():
            made[variant.name] = partial(Kernel(ctypes.CDLL(str(variant.path()))), queries, keys, values, layout)
    return made


def smallest(of: dict[str, Way], seconds: float) -> dict[str, float]:
    """Processor seconds of each."""
    times = dict.fromkeys(of, float("inf"))
    end = time.process_time() + seconds
    while time.process_time() < end or float("inf") in times.values():
        for name, way in of.items():
            start = time.process_time()
            way()
            times[name] = min(times[name], time.process_time() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--heads", default="9,3,64", help="heads, KV heads, head_dim (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of processor time, for each line (%(default)s)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    heads = [int(number) for number in asked.heads.split(",")]
    for index, case in enumerate(CASES):
        requests, before, tokens = case
        times = smallest(ways(case, heads, getattr(torch, asked.dtype)), asked.seconds)
        if index == 0:
            print(f"| {asked.dtype}, ms | " + " | ".join(times) + " |\n| --- |" + " --- |" * len(times))
        what = f"{requests} × 1 token after {before}" if tokens == 1 else f"{tokens} tokens after {before}"
        print(f"| {what} | " + " | ".join(f"{value * 1e3:.2f}" for value in times.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
