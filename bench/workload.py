"""What is asked: prompts as recipes, and the lengths of answers. Pure; the same seed gives the same requests.

A recipe names streams of random numbers and says how much of each to take. Two prompts whose recipes begin with
the same streams begin with the same tokens, whatever the tokenizer: that is how prefixes are shared. What
the numbers become is in `bench.prompts`; when each request is due comes from `bench.arrivals`, or from a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Segment:
    """The first `count` tokens of the stream called `stream`."""

    stream: str
    count: int


Recipe = tuple[Segment, ...]
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform between two bounds, both included."""

    low: int
    high: int

    def draw(self, chance: Random) -> int:
        return chance.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request before it has a time. A prompt from a file is text or messages, all others are recipes."""

    prompt: Recipe | str | Messages
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a run. `due` is seconds from the start; without a schedule it is 0."""

    index: int
    due: float
    ask: Ask


def length(recipe: Recipe) -> int:
    return sum(segment.count for segment in recipe)


def random_asks(chance: Random, inputs: Lengths, outputs: Lengths) -> Iterator[Ask]:
    """Prompts that share nothing."""
    number = 0
    while True:
        yield Ask((Segment(f"own{number}", inputs.draw(chance)),), outputs.draw(chance))
        number += 1


def prefixed_asks(chance: Random, groups: int, prefix: int, inputs: Lengths, outputs: Lengths) -> Iterator[Ask]:
    """Each prompt: the `prefix` tokens of one of `groups`, drawn at random, then tokens of its own."""
    number = 0
    while True:
        shared = Segment(f"prefix{chance.randrange(groups)}", prefix)
        yield Ask((shared, Segment(f"own{number}", inputs.draw(chance))), outputs.draw(chance))
        number += 1


def plan(asks: Iterable[Ask], due: Iterable[float], count: int | None, seconds: float | None) -> list[Planned]:
    """At most `count` requests, all due within `seconds`; one of the two must bound it."""
    assert count is not None or seconds is not None, "a plan needs an end"
    timed = zip(due, asks, strict=False)
    if seconds is not None:
        timed = takewhile(lambda pair: pair[0] < seconds, timed)  # type: ignore[assignment]
    return [Planned(index, at, ask) for index, (at, ask) in enumerate(islice(timed, count))]
