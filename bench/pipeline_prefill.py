"""`python -m bench.pipeline_prefill`: a long prompt on two prefill ranks, beside one rank and beside the ideal.

In: a prompt length, rounds, options of `paceline up` for both clusters. Out: times to the first token, the speed-up of
two ranks over one, and how much of the ideal of two ranks was reached; exit code 1 below the target. One cluster has
one prefill rank, the other two, one thread each; both run all the time and are asked in turn, in another order each
round.

*Ideal*: what the chunks would take if no message took any time, from the forwards of the same run,

    end(c, s) = max(end(c - 1, s), end(c, s - 1)) + t(c, s),

with t(c, s) as the two ranks measured it (so with both cores busy), and, for comparison, with half of what
the single rank measured for chunk c (so as if a busy core did not slow the other one, and a rank did nothing but its
layers).

The second is fair only on a machine that does nothing else: how long the ranks' threads waited for a processor is told.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.local_cluster import started_cluster
from bench.members import members, spent
from bench.timelines import RankTimes, now_us, read_times
from bench.ttft import FIRST_ID, LAST_ID, model_of, ttft

LIMIT = 0.9
SETTLED = 1.0  # after the first token, for the results of the last chunk to be everywhere
# A prompt may take minutes where cores are slow: no deadline is to end the measurement.
_PATIENT = ["--stage-timeout", "600", "--tick-timeout", "300", "--decode-pp", "1"]

Forwards = list[list[float]]  # seconds, by chunk and rank


@dataclass(frozen=True, slots=True)
class Passage:
    """Of one prompt through the prefill ranks of a cluster, in seconds."""

    ttft: float  # as the client sees it
    span: float  # from the launch of the first chunk until the result of the last was in rank 0's log
    forwards: Forwards
    cpu: float  # of all ranks
    starved: float  # per rank: seconds in which a thread could have run and no processor was free


@dataclass(frozen=True, slots=True)
class Round:
    one: Passage
    two: Passage

    @property
    def ideal(self) -> float:
        return makespan(self.two.forwards)

    @property
    def of_ideal(self) -> float:
        """Of the speed-up that the forwards as they were allow: the client's time against the ideal."""
        return self.ideal / self.two.ttft

    @property
    def of_undisturbed(self) -> float:
        """The same if each of the two ranks took its half of what the single one took for the chunk."""
        return makespan([[sum(chunk) / 2] * 2 for chunk in self.one.forwards]) / self.two.ttft

    @property
    def dearer(self) -> float:
        """What all forwards took on two ranks, as a multiple of what they took on one."""
        return sum(map(sum, self.two.forwards)) / sum(map(sum, self.one.forwards))

    @property
    def balance(self) -> float:
        """The first rank's forwards over the second's."""
        first, second = (sum(chunk[rank] for chunk in self.two.forwards) for rank in (0, 1))
        return first / second


def makespan(forwards: Forwards) -> float:
    """Chunks in order through ranks in order, and nothing else takes time."""
    ends = [0.0] * len(forwards[0])
    for chunk in forwards:
        before = 0.0
        for rank, seconds in enumerate(chunk):
            before = ends[rank] = max(ends[rank], before) + seconds
    return ends[-1]


def forwards_of(ranks: Sequence[RankTimes]) -> Forwards:
    """Raises `ValueError` if the ranks do not tell of the same chunks."""
    chunks = [[tick.tick for tick in times.ticks] for times in ranks]
    if not chunks[0] or any(own != chunks[0] for own in chunks):
        raise ValueError(f"the ranks tell of different microbatches: {chunks}")
    columns = [[(tick.ended_us - tick.fed_us) / 1e6 for tick in times.ticks] for times in ranks]
    return [list(chunk) for chunk in zip(*columns, strict=True)]


def passage(url: str, run_dir: Path, model: str, prompt: list[int]) -> Passage:
    of = [member for member in members(run_dir) if member.rank is not None and member.name.startswith("prefill")]
    before, began = spent(of), now_us()
    seconds = ttft(url, model, prompt)
    used = spent(of)
    cpu = sum(after.whole - before[name].whole for name, after in used.items())
    starved = sum(after.starved - before[name].starved for name, after in used.items()) / len(used)
    time.sleep(SETTLED)
    ranks = [times for times in read_times(run_dir, began) if times.role == "prefill"]
    first = ranks[0].ticks
    span = (first[-1].harvested_us - first[0].launched_us) / 1e6
    return Passage(seconds, span, forwards_of(ranks), cpu, starved)


def measure(tokens: int, count: int, within: float, options: list[str]) -> list[Round]:
    """No round begins that would not end `within` so many seconds, by the longest so far."""
    chance, began, longest = random.Random(tokens), time.monotonic(), 0.0
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(started_cluster([*_PATIENT, "--prefill-pp", str(ranks), *options])) for ranks in (1, 2)
        ]
        model = model_of(clusters[0].url)
        rounds: list[Round] = []
        for number in range(count + 1):
            at = time.monotonic()
            if rounds and at - began + longest > within:
                print(f"{len(rounds)} of {count} rounds: no time for another", file=sys.stderr)
                break
            length = tokens if number else min(tokens, 1024)  # the first round is for warming up
            prompt = [chance.randint(FIRST_ID, LAST_ID) for _ in range(length)]
            found: dict[int, Passage] = {}
            for place in chance.sample((0, 1), 2):
                found[place] = passage(clusters[place].url, clusters[place].run_dir, model, prompt)
            if number:
                rounds.append(Round(found[0], found[1]))
                longest = max(longest, time.monotonic() - at)
                print(f"round {number} of {count}: {rounds[-1].of_ideal:.3f} of the ideal", file=sys.stderr, flush=True)
    return rounds


def told(rounds: Sequence[Round]) -> list[str]:
    """For people: medians over the rounds."""

    def middle(figure: Callable[[Round], float]) -> str:
        return f"{median(map(figure, rounds)):.3f}"

    one, two = middle(lambda each: each.one.ttft), middle(lambda each: each.two.ttft)
    starved = [middle(lambda each, name=name: getattr(each, name).starved) for name in ("one", "two")]  # type: ignore[misc]
    rows = [
        ("times to the first token on one rank, on two", f"{one} s, {two} s"),
        ("speed-up", middle(lambda each: each.one.ttft / each.two.ttft)),
        (
            "speed-up if the two ranks' forwards alone took time (ideal)",
            middle(lambda each: each.one.ttft / each.ideal),
        ),
        ("share of it that was reached", middle(lambda each: each.of_ideal)),
        ("  by the pipeline alone, without gateway and client", middle(lambda each: each.ideal / each.two.span)),
        ("all forwards of two ranks over those of one", middle(lambda each: each.dearer)),
        ("forwards of the first rank over those of the second", middle(lambda each: each.balance)),
        ("CPU time of the two ranks over that of the one", middle(lambda each: each.two.cpu / each.one.cpu)),
        ("seconds without a processor, per rank: one, two", f"{starved[0]} s, {starved[1]} s"),
        ("share of the ideal by halves of the one rank's forwards", middle(lambda each: each.of_undisturbed)),
    ]
    return [f"{what:60} {figure}" for what, figure in rows]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline_prefill", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8000, help="of each prompt (default: 8000)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument(
        "--within", type=float, default=330.0, metavar="S", help="begin no round too late (default: 330)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round here")
    parser.add_argument("up", nargs="?", default="", metavar="OPTIONS", help="further ones of `paceline up`, quoted")
    options = parser.parse_args()
    rounds = measure(options.tokens, options.rounds, options.within, shlex.split(options.up))
    print("\n".join(told(rounds)))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in rounds]))
    return 0 if median(each.of_ideal for each in rounds) >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
