"""Where the requests of one packed batch have their positions, as arrays that every layer reads.

In: page tables and lengths. Out: a `Layout`. Invariant: once made, its arrays agree with each other and with the
size of the pool, so that no position of the batch can lead outside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Window = int | None  # how many last positions a query sees, itself included; None = all


@dataclass(frozen=True, slots=True)
class Layout:
    """`pages` int32 `[requests, pages per request]`: position p of a request is in page `p // page_size` of its row.
    `first_query` int64 `[requests + 1]`: its tokens are `[first_query[r], first_query[r + 1])` of the packed ones.
    `lengths` int64 `[requests]`: its positions in the pool, the batch's own included, which are the last ones."""

    pages: torch.Tensor
    first_query: torch.Tensor
    lengths: torch.Tensor
    page_size: int
    pages_in_pool: int
    tokens: int  # first_query[-1]
    window: Window

    def __post_init__(self) -> None:
        """Raises `ValueError` for arrays that contradict each other."""
        requests = len(self.lengths)
        expect("page tables", self.pages, (requests, self.pages.shape[-1]), torch.int32)
        expect("first queries", self.first_query, (requests + 1,), torch.int64)
        expect("lengths", self.lengths, (requests,), torch.int64)
        if requests < 1 or self.page_size < 1 or (self.window is not None and self.window < 1):
            raise ValueError(
                f"{requests} requests, pages of {self.page_size} and a window of {self.window} make no batch"
            )
        own = self.first_query.diff()
        if int(self.first_query[0]) != 0 or int(self.first_query[-1]) != self.tokens:
            raise ValueError(f"the requests' queries are not those of {self.tokens} tokens")
        if int(own.min()) < 1 or bool((own > self.lengths).any()):
            raise ValueError("every request needs at least one token, and at least as many positions as tokens")
        if int(self.lengths.max()) > self.pages.shape[1] * self.page_size:
            raise ValueError(
                f"{self.pages.shape[1]} pages of {self.page_size} do not hold {int(self.lengths.max())} positions"
            )
        if int(self.pages.min()) < 0 or int(self.pages.max()) >= self.pages_in_pool:
            raise ValueError(f"a page table names a page outside 0..{self.pages_in_pool - 1}")


def expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises `ValueError` unless it is just that, dense and in the memory of the CPU."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be {dtype} {list(shape)}, contiguous, on the CPU, not {tensor.dtype} {list(tensor.shape)} "
            f"with strides {tensor.stride()} on {tensor.device}"
        )
