"""When requests are due. Pure: seconds from the start of a run, never decreasing, from a seeded generator.

Each function yields without end; who asks decides how many requests, or for how long. `burstiness` is the
shape of the gamma distribution of the gaps, whose coefficient of variation is 1/√burstiness: 1 is a Poisson
process, less is burstier, more is steadier.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that goes in a straight line from `first` to `last` requests per second, and then stays."""

    first: float
    last: float
    seconds: float


def constant(rate: float) -> Iterator[float]:
    number = 0
    while True:
        yield number / rate
        number += 1


def gamma(chance: Random, rate: float, burstiness: float = 1.0) -> Iterator[float]:
    at = 0.0
    while True:
        at += chance.gammavariate(burstiness, 1 / (rate * burstiness))
        yield at


def ramp(chance: Random, shape: Ramp) -> Iterator[float]:
    """A Poisson process of that rate: one of rate 1, with its time stretched."""
    grown = shape.last - shape.first
    whole = (shape.first + shape.last) / 2 * shape.seconds  # requests expected by the end of the ramp
    expected = 0.0
    while True:
        expected += chance.expovariate(1.0)
        if expected >= whole:
            yield shape.seconds + (expected - whole) / shape.last
        elif grown == 0:
            yield expected / shape.first
        else:
            # The root of first·t + grown·t²/(2·seconds) = expected.
            root = math.sqrt(shape.first**2 + 2 * grown * expected / shape.seconds)
            yield (root - shape.first) * shape.seconds / grown
