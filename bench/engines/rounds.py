"""The measurement: every round puts the same prompts on every engine, one after the other in an order drawn anew.

In: engines that are ready. Out: per round, case and engine the answer. An engine that is not asked must use no
processor, or it would be measured with the others: how much the others used is kept beside each answer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from bench.engines.cases import WARM_UP, Case, prompts_of
from bench.engines.process import Answer, EngineProcess
from bench.prompts import Lexicon

Round = dict[str, dict[str, "Measured"]]  # by case, then by engine


@dataclass(frozen=True, slots=True)
class Measured:
    answer: Answer
    value: float  # of the case's figure
    others_cpu_s: float  # what the engines that were not asked used meanwhile


def run_rounds(
    engines: Mapping[str, EngineProcess], plan: Mapping[Case, Sequence[str]], rounds: int, seed: int, lexicon: Lexicon
) -> list[Round]:
    """`plan`: which engines are measured in a case."""
    for engine in engines.values():
        engine.ask(prompts_of(WARM_UP, 0, seed, lexicon), WARM_UP.new_tokens)
    chance = Random(f"{seed}/order")
    measured = []
    for number in range(rounds):
        found: Round = {}
        for case, names in plan.items():
            prompts = prompts_of(case, number, seed, lexicon)
            answers = {name: _measure(engines, name, case, prompts) for name in chance.sample(names, len(names))}
            found[case.name] = {name: answers[name] for name in names}
        measured.append(found)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return measured


def _measure(engines: Mapping[str, EngineProcess], name: str, case: Case, prompts: list[list[int]]) -> Measured:
    others = [engine for other, engine in engines.items() if other != name]
    before = sum(engine.cpu_s() for engine in others)
    answer = engines[name].ask(prompts, case.new_tokens)
    used = sum(engine.cpu_s() for engine in others) - before
    tokens = case.new_tokens * case.concurrency
    return Measured(answer, answer.cpu_s if case.about_first_token else tokens / answer.cpu_s, used)
