"""What the rounds say: figures beside ours, whether the engines agree on the tokens, and whether ours is the fastest.

Pure. Ratios are those of `bench.compare`: of each round, an engine's figure over ours, then the median.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median

from bench.compare import Line, ratio_lines
from bench.engines.cases import Case
from bench.engines.rounds import Round

MOST_IDLE = 0.02  # of a core, by all engines together that are not asked


def lines_of(rounds: Sequence[Round], cases: Sequence[Case], seed: int) -> list[Line]:
    """Ours is the first engine of each case."""
    lines = []
    for case in cases:
        values = {name: [each[case.name][name].value for each in rounds] for name in rounds[0][case.name]}
        lines += ratio_lines(case.figure, values, seed)
    return lines


def slower_than(lines: Sequence[Line], case: Case, judged: Collection[str]) -> str | None:
    """The best of the judged engines in this case and how much faster it is; None if ours is at least as fast."""
    speeds = {
        line.target: 1 / line.ratio if case.about_first_token else line.ratio
        for line in lines
        if line.figure == case.figure and line.target in judged
    }
    if not speeds or max(speeds.values()) <= 1:
        return None
    best = max(speeds, key=speeds.__getitem__)
    return f"{case.name}: ours has {1 / speeds[best]:.3f} of the speed of {best}"


def disagreements(rounds: Sequence[Round], case: Case) -> list[str]:
    """Engines whose tokens are not ours, with how many answers differ."""
    found = []
    ours, *others = rounds[0][case.name]
    for name in others:
        pairs = [
            (mine, other)
            for each in rounds
            for mine, other in zip(
                each[case.name][ours].answer.tokens, each[case.name][name].answer.tokens, strict=True
            )
        ]
        different = sum(mine != other for mine, other in pairs)
        if different:
            found.append(f"{case.name}: {name} gave other tokens than ours in {different} of {len(pairs)} answers")
    return found


def answers_of(rounds: Sequence[Round]) -> int:
    return sum(len(measured.answer.tokens) for each in rounds for case in each.values() for measured in case.values())


def idle_share(rounds: Sequence[Round]) -> float:
    """Of a core: what all engines that were not asked used, over all answers."""
    every = [measured for each in rounds for case in each.values() for measured in case.values()]
    return sum(measured.others_cpu_s for measured in every) / sum(measured.answer.wall_s for measured in every)


def wall_lines(rounds: Sequence[Round], case: Case) -> list[str]:
    """Median seconds by the clock, which count only on a machine that does nothing else."""
    return [
        f"{case.figure:18} {name:16} {median(each[case.name][name].answer.wall_s for each in rounds):10.2f} s"
        for name in rounds[0][case.name]
    ]
