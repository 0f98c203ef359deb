"""What the engines are asked: cases, and the prompts of each round.

Pure: the same seed, round and case give the same prompts. They share nothing, so that no cache answers for an engine,
and are made of plain words, after which a language model is rarely torn between two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from bench.prompts import Lexicon, Writer
from bench.workload import Lengths, Segment


@dataclass(frozen=True, slots=True)
class Case:
    """`concurrency` requests at once, answers of `new_tokens`. With one token it is about the time until it comes."""

    name: str
    concurrency: int
    lengths: Lengths
    new_tokens: int

    @property
    def about_first_token(self) -> bool:
        return self.new_tokens == 1

    @property
    def figure(self) -> str:
        if self.about_first_token:
            return f"{self.name}: CPU s"
        return f"{self.name}: tokens/CPU s"


OUTPUT = 24  # tokens; about as many steps as chunks, so that neither prefill nor decode hides the other
CASES = {
    "1": Case("1", 1, Lengths(64, 64), OUTPUT),
    "8": Case("8", 8, Lengths(19, 124), OUTPUT),
    "32": Case("32", 32, Lengths(19, 124), OUTPUT),
    "ttft": Case("ttft", 1, Lengths(1024, 1024), 1),
}
WARM_UP = Case("warm-up", 8, Lengths(19, 124), 4)


def prompts_of(case: Case, number: int, seed: int, lexicon: Lexicon) -> list[list[int]]:
    """Round `number`'s prompts."""
    chance = Random(f"{seed}/{case.name}/{number}")
    writer = Writer(seed, lexicon)
    return [
        writer.ids((Segment(f"{case.name}/{number}/{index}", case.lengths.draw(chance)),))
        for index in range(case.concurrency)
    ]
