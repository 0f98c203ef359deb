"""Attention: equal to an independent reference, and a token's bits do not depend on anything around it.

Everything is asked of each build of the compiled kernel that this processor runs, and of the way in plain torch.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from engine.attention import PackedBatch, attend_in_torch
from engine.layout import Layout, Window
from engine.native.build import variants
from engine.native.kernel import Kernel, best
from engine.native.library import runnable
from tests.engine.driver import PlainRow

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor]
HEADS = {"grouped": (9, 3), "alone": (2, 2), "one of many": (7, 1)}
WAYS = [*(variant.name for variant in variants()), "torch"]


@pytest.fixture(params=WAYS)
def attend(request: pytest.FixtureRequest) -> Attend:
    if request.param == "torch":
        return attend_in_torch
    for variant in runnable():
        if variant.name == request.param:
            assert variant.path().exists(), "not built: run make setup"
            return Kernel(ctypes.CDLL(str(variant.path())))
    pytest.skip("this processor cannot run it")


@dataclass(frozen=True)
class Text:
    """One request's queries, keys and values at positions 0 .. length, as a model would have made them."""

    queries: torch.Tensor  # [length, heads, head_dim]
    keys: torch.Tensor  # [length, kv_heads, head_dim]
    values: torch.Tensor


def text(
    length: int, heads: tuple[int, int] = (9, 3), head_dim: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Text:
    chance = torch.Generator().manual_seed(seed)
    made = [torch.randn(length, count, head_dim, generator=chance) for count in (heads[0], heads[1], heads[1])]
    return Text(*(tensor.to(dtype) for tensor in made))


def run(
    attend: Attend,
    parts: Sequence[tuple[Text, int, int]],
    page_size: int = 16,
    window: Window = None,
    seed: int = 0,
) -> list[torch.Tensor]:
    """What tokens `[start, end)` of each text get in one batch, each `[end - start, heads * head_dim]`. Pages are
    scattered, and whatever no position of the batch has written is not a number."""
    needed = [-(-end // page_size) for _, _, end in parts]
    pages = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(pages)
    first = parts[0][0]
    shape = (len(pages) * page_size, *first.keys.shape[1:])
    keys, values = (torch.full(shape, torch.nan, dtype=first.keys.dtype) for _ in range(2))
    rows = []
    for (own, start, end), count in zip(parts, needed, strict=True):
        row = PlainRow(start, range(start, end), [pages.pop() for _ in range(count)])
        slots = [row.pages[position // page_size] * page_size + position % page_size for position in range(end)]
        keys[slots], values[slots] = own.keys[:end], own.values[:end]
        rows.append(row)
    batch = PackedBatch(rows, page_size, shape[0] // page_size)
    queries = torch.cat([own.queries[start:end] for own, start, end in parts])
    # As in a layer: the heads of a token lie beside its keys.
    beside = torch.cat((queries, queries[:, :2]), dim=1)[:, : queries.shape[1]]
    return list(attend(beside, keys, values, batch.layout(window)).split([end - start for _, start, end in parts]))


def exact(own: Text, window: Window = None) -> torch.Tensor:
    """float64 `[length, heads * head_dim]`, by the definition."""
    length, heads, head_dim = own.queries.shape
    keys, values = (
        tensor.double().repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (own.keys, own.values)
    )
    scores = torch.einsum("qhd,khd->hqk", own.queries.double(), keys) * head_dim**-0.5
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).reshape(length, heads * head_dim)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128])
def test_float32_is_exact_to_a_few_units_in_the_last_place(attend: Attend, heads: str, head_dim: int) -> None:
    own = text(150, HEADS[heads], head_dim)
    (answer,) = run(attend, [(own, 0, 150)])
    torch.testing.assert_close(answer.double(), exact(own), rtol=0, atol=4e-6)


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_token_sees_its_window(attend: Attend, window: int) -> None:
    own = text(210, head_dim=16)
    (answer,) = run(attend, [(own, 0, 210)], window=window)
    torch.testing.assert_close(answer.double(), exact(own, window), rtol=0, atol=4e-6)


@pytest.mark.parametrize("head_dim", [24, 64])
def test_bfloat16_is_rounded_once_at_the_end(attend: Attend, head_dim: int) -> None:
    own = text(130, head_dim=head_dim, dtype=torch.bfloat16)
    (answer,) = run(attend, [(own, 0, 130)])
    assert answer.dtype == torch.bfloat16
    # All but the few that lie within float32's error of the middle between two.
    assert answer.ne(exact(own).bfloat16()).double().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("window", [None, 50])
def test_bits_do_not_depend_on_chunks_batch_pages_or_page_size(
    attend: Attend, dtype: torch.dtype, head_dim: int, window: Window
) -> None:
    length = 143
    own = text(length, head_dim=head_dim, dtype=dtype)
    other = text(length, head_dim=head_dim, dtype=dtype, seed=1)
    (whole,) = run(attend, [(own, 0, length)], window=window)
    for chunk, page_size in ((1, 16), (17, 8), (32, 1), (100, 7), (length, 128)):
        # All chunks at once, each of a request that has read what comes before, among chunks of another text.
        parts = [(own, start, min(start + chunk, length)) for start in range(0, length, chunk)]
        if chunk == 1:
            parts = parts[::3]
        parts += [(other, 0, 1), (other, 97, 98), (other, 90, 130)]
        random.Random(chunk).shuffle(parts)
        for (which, start, end), answer in zip(parts, run(attend, parts, page_size, window, seed=chunk), strict=True):
            assert which is other or torch.equal(answer, whole[start:end])
    for start in (0, 15, 63, 64, 142):
        (alone,) = run(attend, [(own, start, start + 1)], page_size=4, window=window)
        assert torch.equal(alone, whole[start : start + 1])


def test_a_broken_token_breaks_no_earlier_one(attend: Attend) -> None:
    # Not even in the same chunk: a weight of zero times infinity would.
    own = text(90)
    (whole,) = run(attend, [(own, 0, 90)])
    own.values[40] = torch.inf
    own.values[41] = torch.nan
    own.keys[77] = torch.nan
    (answer,) = run(attend, [(own, 0, 90)])
    assert torch.equal(answer[:40], whole[:40])
    assert bool(answer[40:].isfinite().logical_not().all())
    assert bool(answer[77:].isnan().all())
    # A token that no longer sees it is as it was.
    (near,) = run(attend, [(own, 0, 90)], window=12)
    assert bool(near[53:77].isfinite().all())


def test_scores_too_large_for_an_exponential_are_fine(attend: Attend) -> None:
    own = text(100)
    own.queries.mul_(1e6)
    (answer,) = run(attend, [(own, 0, 100)])
    torch.testing.assert_close(answer.double(), exact(own), rtol=0, atol=4e-6)


def test_rounding_to_bfloat16_keeps_what_is_not_a_number(attend: Attend) -> None:
    # All bits of a NaN set: adding half a unit to round would wrap around to zero.
    own = text(3, dtype=torch.bfloat16)
    own.values.view(torch.int16)[0] = 0x7FFF
    own.values[1] = torch.finfo(torch.bfloat16).max
    (answer,) = run(attend, [(own, 0, 3)])
    assert bool(answer.isnan().all())


def test_what_was_built_for_this_processor_is_used() -> None:
    assert best() is not None
    assert runnable()[-1].name == "baseline"


def pool_and_layout() -> tuple[torch.Tensor, torch.Tensor, Layout]:
    batch = PackedBatch([PlainRow(3, [1, 2], [0, 3])], 4, 4)
    return torch.zeros(2, 4, 8), torch.zeros(16, 2, 8), batch.layout(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, way: way(q.double(), k, v), "float32 and bfloat16 on CPUs, not torch.float64"),
        (lambda q, k, v, way: way(q[:1], k, v), "do not fit 2 tokens"),
        (lambda q, k, v, way: way(q[:, :3], k, v), "do not fit 2 tokens and 2 KV heads"),
        (lambda q, k, v, way: way(q.transpose(0, 1).contiguous().transpose(0, 1), k, v), "heads of a token must lie"),
        (lambda q, k, v, way: way(q[:1].expand(2, 4, 8), k, v), "heads of a token must lie"),
        (lambda q, k, v, way: way(q, k[:15], v), r"keys must be torch.float32 \[16, 2, 8\]"),
        (lambda q, k, v, way: way(q, k, v[:, :, :4]), r"values must be torch.float32 \[16, 2, 8\]"),
        (lambda q, k, v, way: way(q, k.bfloat16(), v), "keys must be torch.float32"),
        (lambda q, k, v, way: way(q, k, v.transpose(1, 2).contiguous().transpose(1, 2)), "values must be"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: Callable[..., object], message: str) -> None:
    queries, pool, layout = pool_and_layout()
    kernel = best()
    assert kernel is not None
    with pytest.raises(ValueError, match=message):
        change(queries, pool, pool, lambda q, k, v: kernel(q, k, v, layout))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": torch.tensor([[0, 4]], dtype=torch.int32)}, "outside 0..3"),
        ({"pages": torch.tensor([[-1, 0]], dtype=torch.int32)}, "outside 0..3"),
        ({"pages": torch.tensor([[0]], dtype=torch.int32)}, "1 pages of 4 do not hold 5 positions"),
        ({"pages": torch.tensor([[0, 1]])}, "page tables must be torch.int32"),
        ({"first_query": torch.tensor([0, 6]), "tokens": 6}, "at least as many positions as tokens"),
        ({"first_query": torch.tensor([0, 0]), "tokens": 0}, "at least one token"),
        ({"first_query": torch.tensor([1, 2])}, "not those of 2 tokens"),
        ({"first_query": torch.tensor([0])}, "first queries must be"),
        ({"lengths": torch.tensor([5], dtype=torch.int32)}, "lengths must be torch.int64"),
        ({"window": 0}, "a window of 0"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(change: dict[str, object], message: str) -> None:
    fine = {
        "pages": torch.tensor([[0, 3]], dtype=torch.int32),
        "first_query": torch.tensor([0, 2]),
        "lengths": torch.tensor([5]),
        "page_size": 4,
        "pages_in_pool": 4,
        "tokens": 2,
        "window": None,
    }
    Layout(**fine)
    with pytest.raises(ValueError, match=message):
        Layout(**{**fine, **change})
