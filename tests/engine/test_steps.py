"""The compiled steps of a layer: what torch would give, row by row, and nothing else."""

from __future__ import annotations

import ctypes

import pytest
import torch

from engine import steps
from engine.native.build import variants
from engine.native.library import runnable
from engine.native.steps import Steps

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WIDTHS = (8, 24, 64, 100, 576)
ROWS = (1, 2, 7, 40)
BY_NAME = {variant.name: variant for variant in runnable()}


@pytest.fixture(params=[variant.name for variant in variants()])
def compiled(request: pytest.FixtureRequest) -> Steps:
    if request.param not in BY_NAME:
        pytest.skip(f"this processor does not run {request.param}")
    return Steps(ctypes.CDLL(str(BY_NAME[request.param].path())))


@pytest.fixture(params=list(DTYPES.values()), ids=list(DTYPES))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways of `engine.steps` where no kernel was built."""
    monkeypatch.setattr(steps, "steps", lambda dtype: None)


def noise(*shape: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few units in the last place, and of a bfloat16 within one: it may be rounded the other way."""
    tolerance = 1e-5 if found.dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_is_normalized_as_in_torch_and_alone(compiled: Steps, dtype: torch.dtype, width: int) -> None:
    weight = noise(width, dtype=dtype, seed=4)
    wide = noise(40, 3 * width, dtype=dtype)
    for x in (wide[:, :width].contiguous(), wide[:, width : 2 * width], wide.view(40, 3, width)[:, :2]):
        found = compiled.normalize(x, weight, 1e-5)
        assert found.is_contiguous()
        assert found.shape == x.shape
        assert_close(found, steps.normalize(x, weight, 1e-5))
        for rows in ROWS:
            assert torch.equal(compiled.normalize(x[:rows], weight, 1e-5), found[:rows])


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("width", WIDTHS)
def test_a_gate_is_what_torch_gives_and_of_one_row(compiled: Steps, dtype: torch.dtype, width: int) -> None:
    gate_up = noise(40, 2 * width, dtype=dtype) * 4
    found = compiled.gate(gate_up)
    assert_close(found, steps.gate(gate_up))
    for rows in ROWS:
        assert torch.equal(compiled.gate(gate_up[:rows].contiguous()), found[:rows])


def test_a_gate_holds_at_the_ends_of_the_numbers(compiled: Steps, dtype: torch.dtype) -> None:
    ends = torch.tensor([0.0, -0.0, 1e-30, 60, -60, 90, -90, 3e38, -3e38, float("inf")], dtype=dtype)
    found = compiled.gate(torch.cat((ends, torch.ones_like(ends)))[None])[0]
    assert_close(found, torch.nn.functional.silu(ends))
    broken = torch.ones(2, 20, dtype=dtype)
    broken[0, 3] = float("nan")
    answer = compiled.gate(broken)
    assert bool(answer[0, 3].isnan())
    assert int(answer.isnan().sum()) == 1, "what is no number stays where it is"


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize(("queries", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 8), (4, 2, 24), (3, 3, 100)])
def test_heads_are_rotated_as_in_torch_to_the_bit_and_kept_at_their_slots(
    compiled: Steps, dtype: torch.dtype, queries: int, kv_heads: int, head_dim: int
) -> None:
    heads = noise(7, queries + 2 * kv_heads, head_dim, dtype=dtype)
    angles = noise(7, 1, head_dim // 2, dtype=torch.float32, seed=5)
    angles = torch.cat((angles, angles), dim=-1)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([5, 30, 2, 3, 31, 0, 17])
    pools = [torch.full((32, kv_heads, head_dim), 9.0).to(dtype) for _ in range(4)]
    expected = steps.rotate_and_keep(heads.clone(), rotation, slots, *pools[:2])
    found = compiled.rotate_and_keep(heads.clone(), rotation, slots, *pools[2:])
    assert torch.equal(found, expected)
    assert torch.equal(pools[2], pools[0])
    assert torch.equal(pools[3], pools[1])
    assert bool((pools[2][1] == 9).all()), "slots of nobody stay untouched"


def test_tensors_that_do_not_fit_are_refused(compiled: Steps) -> None:
    x, weight = torch.ones(4, 16), torch.ones(16)
    with pytest.raises(ValueError, match=r"must lie together; \[16, 4\]"):
        compiled.normalize(x.T, weight, 1e-5)
    for wrong in (torch.ones(15), weight.bfloat16()):
        with pytest.raises(ValueError, match=r"weights of a norm must be torch.float32 \[16\]"):
            compiled.normalize(x, wrong, 1e-5)
    with pytest.raises(ValueError, match="gate and up must be"):
        compiled.gate(torch.ones(4, 15))
    heads, pool, slots = torch.ones(4, 6, 8), torch.ones(32, 2, 8), torch.arange(4)
    good = (torch.ones(4, 1, 8), torch.ones(4, 1, 8))
    for arguments, message in (
        ((heads, good, slots[:3], pool, pool), "slots must be"),
        ((heads, good, slots.int(), pool, pool), "slots must be"),
        ((heads, (good[0][:3], good[1]), slots, pool, pool), "cosines must be"),
        ((heads, (good[0], good[1].bfloat16()), slots, pool, pool), "sines must be"),
        ((heads, good, slots, pool, pool[:31]), "values must be"),
        ((heads, good, slots, pool.bfloat16(), pool), "keys must be"),
        ((heads, good, slots, torch.ones(32, 3, 8), torch.ones(32, 3, 8)), "is no shape of queries"),
        ((torch.ones(6, 4, 8).transpose(0, 1), good, slots, pool, pool), "heads must be"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled.rotate_and_keep(*arguments)
