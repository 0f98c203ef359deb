"""Rows of a multiplication keep their bits whatever the number of rows, or it is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.linear import Linear, NotInvariant, RowClass, in_class, probe, row_class

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def weights(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype),
        torch.randn(outputs, generator=generator).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(96, 64), (576, 1536), (128, 4096)])
def test_a_row_keeps_its_bits_in_every_call(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = weights(*shape, dtype)
    multiply = Linear(weight, bias, exact=True)
    rows = torch.randn(700, shape[1], generator=torch.Generator().manual_seed(6)).to(dtype)
    alone = torch.cat([multiply(row[None]) for row in rows[:80]])
    for count in (*range(1, 80, 3), 100, 300, 699):
        assert torch.equal(multiply(rows[:count])[:80], alone[:count]), count
    assert torch.equal(multiply(rows.flip(0))[-80:], alone.flip(0)), "places among other rows"
    exact = rows[:80].double() @ weight.double().T + bias.double()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(alone.double(), exact, rtol=tolerance, atol=tolerance)


WIDTH = 24
ONES = torch.ones(1, WIDTH)


def sums_in_blocks(size: int, rows: torch.Tensor) -> torch.Tensor:
    """Sums of rows, added up column by column in blocks of `size`, so that bits tell which size was taken."""
    columns = list(rows.T)
    blocks = [sum(columns[at : at + size], torch.zeros(())) for at in range(0, WIDTH, size)]
    return torch.stack([sum(blocks, torch.zeros(()))], dim=1)


def test_the_probe_pads_where_few_rows_are_added_up_otherwise() -> None:
    assert probe(lambda rows: sums_in_blocks(7, rows), ONES) == RowClass(1, 0)
    assert probe(lambda rows: sums_in_blocks(7 if len(rows) < 2 else 11, rows), ONES) == RowClass(2, 0)
    assert probe(lambda rows: sums_in_blocks(7 if len(rows) < 16 else 11, rows), ONES) == RowClass(16, 0)


def test_the_probe_cuts_where_many_rows_are_added_up_otherwise() -> None:
    assert probe(lambda rows: sums_in_blocks(7 if 64 <= len(rows) <= 300 else 11, rows), ONES) == RowClass(64, 256)
    assert probe(lambda rows: sums_in_blocks(3 + len(rows) % 5, rows), ONES) == RowClass(64, 64)


def test_the_probe_refuses_what_depends_on_other_rows() -> None:
    def coupled(rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, ONES) + rows[0, 0]

    with pytest.raises(NotInvariant, match=r"weights \[1, 24\] in torch.float32 .* set OMP_NUM_THREADS=1"):
        probe(coupled, ONES)


def test_calls_have_the_sizes_of_the_class() -> None:
    sizes: list[int] = []

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows * 2

    rows = torch.arange(1400.0).view(700, 2)
    for count in (1, 64, 65, 256, 257, 700):
        assert torch.equal(in_class(multiply, RowClass(64, 256), rows[:count]), rows[:count] * 2)
    assert sizes == [64, 64, 65, 256, 256, 64, 256, 256, 188]
    assert in_class(multiply, RowClass(2, 0), rows[:0]).shape == (0, 2)


def test_an_output_head_is_given_few_rows_at_a_time() -> None:
    assert row_class(2**15, 2**9, torch.float32, False).most == 64
