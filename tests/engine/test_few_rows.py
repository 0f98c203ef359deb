"""The compiled product for few rows: right, independent of the number of rows, and only used where it has the library's bits."""

from __future__ import annotations

import ctypes

import pytest
import torch

from engine import linear
from engine.linear import FEW, Linear, sum_block
from engine.native.build import variants
from engine.native.few_rows import FewRows
from engine.native.library import runnable

BY_NAME = {variant.name: variant for variant in runnable()}
SHAPES = [(8, 8), (64, 64), (100, 37), (200, 130), (576, 1536), (1, 5)]


@pytest.fixture(params=[variant.name for variant in variants()])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if request.param not in BY_NAME:
        pytest.skip(f"this processor does not run {request.param}")
    return ctypes.CDLL(str(BY_NAME[request.param].path()))


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [None, 16, 512])
def test_it_is_the_product_and_a_row_is_that_of_a_single_row(
    library: ctypes.CDLL, shape: tuple[int, int], block: int | None
) -> None:
    weight, bias, rows = noise(*shape), noise(shape[0], seed=4), noise(20, shape[1], seed=5)
    for added in (None, bias):
        few = FewRows(library, weight, added, block)
        found = few(rows)
        exact = rows.double() @ weight.double().T + (0 if added is None else added.double())
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-3)
        for count in range(1, 21):
            assert torch.equal(few(rows[:count]), found[:count])
        assert few(rows[:0]).shape == (0, shape[0])


def test_sums_are_those_of_blocks_of_inputs_in_order(library: ctypes.CDLL) -> None:
    weight, rows = torch.ones(1, 48), noise(3, 48) * 1000
    for block in (1, 5, 16, 48):
        expected = []
        for row in rows:
            parts = [sum(row[at : at + block], torch.zeros(())) for at in range(0, 48, block)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            expected.append(total)
        assert torch.equal(FewRows(library, weight, block=block)(rows)[:, 0], torch.stack(expected)), block


def test_what_does_not_fit_is_refused(library: ctypes.CDLL) -> None:
    for arguments in ((torch.ones(4, 4).bfloat16(),), (torch.ones(4, 4), torch.ones(3)), (torch.ones(4, 4), None, 0)):
        with pytest.raises(ValueError, match=r"weights must be|bias must be|a block of 0"):
            FewRows(library, *arguments)
    few = FewRows(library, torch.ones(4, 6))
    for wrong in (torch.ones(2, 5), torch.ones(2, 6).bfloat16(), torch.ones(6, 2).T):
        with pytest.raises(ValueError, match="rows must be"):
            few(wrong)


def test_a_layer_uses_it_where_its_bits_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = noise(96, 64), noise(FEW, 64, seed=5)
    assert sum_block(96, 64, torch.float32) == 64, "a block of all inputs is the library's way for a small product"
    own = Linear(weight, exact=True)
    monkeypatch.setattr(linear, "sum_block", lambda *shape: 0)
    assert torch.equal(own(rows), Linear(weight, exact=True)(rows))
    assert sum_block(96, 64, torch.bfloat16) == 0, "there is no product of bfloat16"


def test_a_library_with_another_order_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Multiply:
        return lambda rows: torch.stack(
            [sum((rows * one).flip(1).T, torch.zeros(len(rows))) + (0 if bias is None else bias[index])
             for index, one in enumerate(weight)], dim=1,
        )  # fmt: skip

    monkeypatch.setattr(linear, "_packed", backwards)
    assert sum_block(3, 40, torch.float32) == 0
