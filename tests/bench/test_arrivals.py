"""Arrival processes have the rate and the burstiness they say, and are the same for the same seed."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile
from random import Random
from statistics import fmean, pstdev

import pytest

from bench.arrivals import Ramp, constant, gamma, ramp

COUNT = 20_000


def gaps(burstiness: float, rate: float = 5.0) -> list[float]:
    moments = islice(gamma(Random(3), rate, burstiness), COUNT)
    return [b - a for a, b in pairwise([0.0, *moments])]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(burstiness: float) -> None:
    found = gaps(burstiness)
    assert fmean(found) == pytest.approx(1 / 5, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_burstiness_1_is_a_poisson_process() -> None:
    """Exponential gaps: as many as e⁻ˣ are longer than x means, for every x."""
    found = gaps(1.0)
    for times, share in ((0.1, 0.9048), (1.0, 0.3679), (3.0, 0.0498)):
        assert sum(gap > times / 5 for gap in found) / COUNT == pytest.approx(share, abs=0.012)


def test_a_constant_rate_does_not_drift() -> None:
    assert list(islice(constant(4.0), 5)) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert next(islice(constant(3.0), 3000, None)) == 1000.0


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Ramp(0.0, 200.0, 100.0), (2500, 7500, 5000)),
        (Ramp(200.0, 50.0, 100.0), (8125, 4375, 1250)),
        (Ramp(100.0, 100.0, 100.0), (5000, 5000, 2500)),
    ],
)
def test_a_ramp_has_as_many_requests_as_the_area_under_it(shape: Ramp, expected: tuple[int, int, int]) -> None:
    """First and second half of the ramp, then 25 s at the last rate."""
    moments = list(takewhile(lambda at: at < 125, ramp(Random(1), shape)))
    assert moments == sorted(moments)
    found = [sum(low <= at < high for at in moments) for low, high in ((0, 50), (50, 100), (100, 125))]
    for got, wanted in zip(found, expected, strict=True):
        assert abs(got - wanted) < 4 * wanted**0.5  # four standard deviations of a Poisson count


def test_the_same_seed_gives_the_same_moments() -> None:
    def draw(seed: int) -> list[float]:
        return list(islice(gamma(Random(seed), 2.0, 0.5), 50))

    assert draw(7) == draw(7) != draw(8)
