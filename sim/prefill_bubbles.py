"""`python -m sim.prefill_bubbles`: how near to its ideal a prefill pipeline comes when devices take a known time.

In: ranks, the time of a forward, prompts. Out: virtual time from the log entry that launched the first chunk until the
one that harvested the last, beside the ideal. The real core runs in the simulator: entries, returns and hidden states
take 0.1 to 0.5 ms each, the loop of rank 0 up to 50 µs, one message in a hundred 20 times as long; a forward takes
exactly its time. What the pipeline itself adds is therefore all that can be seen here, and it is the same on each run.

*Ideal*: k chunks through stages of times t₁ … t_P without any message between them take Σt + (k − 1) · max t; with
equal times (k + P − 1) · t. k is the least number of chunks that the tokens fit into.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from sim.case import MS, Case, Delays, InstancePlan, RequestPlan
from sim.rank import RankProcess
from sim.world import World

CHUNK = 8  # tokens; forwards take as long as they are said to, however many there are
DELAYS = Delays(ring=(MS // 10, MS // 2), link=(MS // 10, MS // 2))
LONG = (128,)  # 16 chunks: 8 192 tokens in chunks of 512
STREAM = tuple(8 + 37 * number % 120 for number in range(48))  # all there from the start, so there is always work
LIMIT = 0.95


@dataclass(frozen=True, slots=True)
class Passage:
    what: str
    ranks: int
    forward_ms: tuple[float, ...]
    chunks: int  # launched
    ideal_ms: float
    took_ms: float

    @property
    def of_ideal(self) -> float:
        return self.ideal_ms / self.took_ms


def ideal(stages: tuple[int, ...], chunks: int) -> int:
    return sum(stages) + (chunks - 1) * max(stages)


def measure(what: str, prompts: tuple[int, ...], stages: tuple[int, ...], seed: int = 1) -> Passage:
    """`stages`: µs of a forward on each rank."""
    pages = sum(-(-tokens // 4) for tokens in prompts)
    case = Case(
        seed=seed,
        prefill=(
            InstancePlan(len(stages), pages, CHUNK, rows=CHUNK, forward=stages, per_token=0, jitter=0.0),
        ),
        decode=(InstancePlan(ranks=1, pages=2 * pages),),
        requests=tuple(RequestPlan(f"r{i}", 0, tokens, 1, ignore_eos=True) for i, tokens in enumerate(prompts)),
        layers=len(stages),
        delays=DELAYS,
    )  # fmt: skip
    world = World(case)
    launched: list[int] = []
    harvested: list[int] = []

    def look(process: RankProcess) -> None:
        if process.rank == 0:
            entry = process.core.recorder.latest.entry
            launched.extend([world.clock.now] * (entry.launch is not None))
            harvested.extend([world.clock.now] * len(entry.returns))

    incarnation = world.instances["P0"]
    assert incarnation is not None
    incarnation.watchers.append(look)
    result = world.run()
    assert not result.violation, result.violation
    assert len(launched) == len(harvested)
    least = ideal(stages, -(-sum(prompts) // CHUNK))
    took = harvested[-1] - launched[0]
    return Passage(what, len(stages), tuple(t / MS for t in stages), len(launched), least / MS, took / MS)


def passages(ranks: int, forward: int) -> list[Passage]:
    uneven = (*(forward for _ in range(ranks - 1)), forward + forward // 5)
    return [
        measure("one prompt of 16 chunks", LONG, (forward,) * ranks),
        measure("a queue of 48 prompts", STREAM, (forward,) * ranks),
        measure("that queue, last rank 1.2 times as slow", STREAM, uneven),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.prefill_bubbles", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8, help="default: 8")
    parser.add_argument(
        "--forward", type=float, nargs="+", default=[50.0], metavar="MS", help="of a rank (default: 50)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [passage for ms in options.forward for passage in passages(options.ranks, int(ms * MS))]
    if options.json:
        print(json.dumps([asdict(passage) | {"of_ideal": passage.of_ideal} for passage in found]))
    else:
        print(f"{'virtual ms':42} {'forward':>8} {'chunks':>7} {'ideal':>10} {'took':>10} {'of ideal':>9}")
        for one in found:
            figures = (
                f"{one.forward_ms[0]:8g} {one.chunks:7} {one.ideal_ms:10.2f} {one.took_ms:10.2f} {one.of_ideal:9.4f}"
            )
            print(f"{one.what:42} {figures}")
    return 0 if all(passage.of_ideal >= LIMIT for passage in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
