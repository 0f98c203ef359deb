"""Disaggregated against the same engine without disaggregation: what the hand-over costs, and what it brings.

    python -m bench.undivided --rounds 6 --json undivided.json

In: nothing but the default model. Out, all in one run, in rounds that are interleaved:

- alone: one prompt at a time on idle servers. The time to the first token may be 1.03 of the undivided engine's.
- beside a stream: the same while one answer streams.
- mixed: four answers stream while long prompts arrive. The p99 of the gaps between the streams' tokens.

Figures are medians over the rounds and medians of the rounds' own ratios. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.compare import Line, interleaved, lines_of, table
from bench.options import COUNT, add_compare
from bench.run import run
from bench.serve import plain
from bench.summary import Summary, summarise, whole_run
from bench.ttft import model_of
from bench.undivided_load import Mixed, Schedule, mixed
from bench.undivided_targets import Target, default_model, on_cores, pair, undivided

MOST_TTFT = 1.03  # of the undivided engine's
LEAST_ITL = 4.0  # the undivided engine's p99 over ours
WARM, SHORT, LONG, LONGEST = 512, 128, 1024, 2048
STREAMS = 4
OURS, THEIRS, TWO_THREADS, SMALL_CHUNKS = "disaggregated", "undivided", "2 threads", "chunks of 128"
ALONE = {
    "TTFT, ms": lambda a: a.summary.latency_ms["ttft"].median,
    "second token, ms": lambda a: a.summary.latency_ms["e2e"].median,
    "CPU, ms": lambda a: a.cpu_ms,
}
BESIDE = {f"TTFT of {length}, ms": (lambda m, length=length: m.ttft(length)) for length in (SHORT, LONG)}
MIXED = {
    "ITL p99, ms": lambda m: m.gaps.p99,
    "ITL max, ms": lambda m: m.gaps.max,
    "ITL median, ms": lambda m: m.gaps.median,
    "tokens of streams": lambda m: m.gaps.count,
} | {f"TTFT of {length}, ms": (lambda m, length=length: m.ttft(length)) for length in (LONG, LONGEST)}


@dataclass(frozen=True, slots=True)
class Alone:
    summary: Summary
    cpu_ms: float  # of all processes of the target, per request


class Comparison:
    def __init__(self, model: str, targets: dict[str, Target], rounds: int) -> None:
        self.model, self.targets, self.rounds = model, targets, rounds
        self.parts: dict[str, list[Line]] = {}
        self.raw: dict[str, Any] = {}

    async def run(self) -> None:
        with_threads = [name for name in (THEIRS, OURS, TWO_THREADS) if name in self.targets]
        await self._alone(list(self.targets), WARM, 1, 1)  # caches, connections
        seconds_of = {}
        # Short requests differ more from one to the next, and more of them fit into the same time.
        for tokens, requests, rounds in ((SHORT, 2, 3 * self.rounds), (LONG, 1, -(-3 * self.rounds // 2))):
            found = await self._alone(with_threads, tokens, requests, rounds)
            lines = self._keep(f"alone, prompts of {tokens} tokens", found, ALONE)
            ttfts = [line.median for line in lines if line.figure == "TTFT, ms" and line.target in (OURS, THEIRS)]
            seconds_of[tokens] = max(ttfts) / 1e3
        seconds_of[LONGEST] = 2 * seconds_of[LONG]
        light = Schedule.spaced((SHORT, LONG), {length: seconds_of[length] + 0.2 for length in (SHORT, LONG)}, 0.7)
        self._keep("beside a stream", await self._mixed([THEIRS, OURS], 1, light, self.rounds), BESIDE)
        heavy = Schedule.spaced((LONG, LONGEST), seconds_of, 0.5)
        names = [OURS, *(name for name in self.targets if name != OURS)]
        found_mixed = await self._mixed(names, STREAMS, heavy, -(-self.rounds // 2))
        self._keep(f"{STREAMS} streams, long prompts", found_mixed, MIXED)

    async def _alone(self, names: Sequence[str], tokens: int, requests: int, rounds: int) -> list[dict[str, Alone]]:
        options = _options(tokens, requests)

        async def measure(name: str, number: int) -> Alone:
            target = self.targets[name]
            before = target.cpu_seconds()
            finished = await run(options, target.url, 1000 * tokens + number)  # no prompt comes twice
            used = target.cpu_seconds() - before
            summary = summarise(finished.records, whole_run(finished.records), {})
            if summary.failed:
                raise SystemExit(f"bench.undivided: {name}: {next(iter(summary.errors))}")
            return Alone(summary, 1e3 * used / requests)

        print(f"{rounds} rounds of prompts of {tokens} tokens", file=sys.stderr, flush=True)
        return await interleaved(names, rounds, 0, measure)

    async def _mixed(
        self, names: Sequence[str], streams: int, schedule: Schedule, rounds: int
    ) -> list[dict[str, Mixed]]:
        async def measure(name: str, number: int) -> Mixed:
            return await mixed(self.targets[name].url, self.model, streams, schedule, number)

        print(f"{rounds} rounds of {streams} streams of {schedule.seconds:.1f} s", file=sys.stderr, flush=True)
        return await interleaved(names, rounds, 0, measure)

    def _keep(
        self, part: str, found: Sequence[Mapping[str, Any]], figures: Mapping[str, Callable[[Any], float]]
    ) -> list[Line]:
        lines = lines_of(found, 0, figures)
        print(f"\n{part}\n" + "\n".join(table(lines, len(found))), flush=True)
        self.parts[part], self.raw[part] = lines, found
        return lines

    def missed(self) -> list[str]:
        """Of the targets, which stand in the first lines of this file."""
        missed = []
        for part, lines in self.parts.items():
            for line in lines:
                if line.figure.startswith("TTFT") and line.target == OURS and line.ratio > MOST_TTFT:
                    missed.append(f"{part}: {line.figure}: {line.ratio:.3f} of the undivided engine's, not {MOST_TTFT}")
                if line.figure == "ITL p99, ms" and line.target == THEIRS and line.ratio < LEAST_ITL:
                    missed.append(f"{part}: {line.figure}: better by {line.ratio:.2f}, not {LEAST_ITL}")
        return missed


def _options(tokens: int, requests: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_compare(parser)
    lengths = ["--input", str(tokens), "--output", "2"]
    shape = ["--concurrency", "1", "--requests", str(requests), "--warmup", "0"]
    return parser.parse_args(["a=http://", *lengths, *shape])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.undivided", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=COUNT, default=6, help="of each part, more of short ones (default: 6)")
    parser.add_argument("--core", type=int, help="everything but this client on this one core (default: on all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round here")
    options = parser.parse_args()
    model = default_model()
    with ExitStack() as stack:
        with on_cores({options.core} if options.core is not None else set()):
            targets = {OURS: stack.enter_context(pair(model)), THEIRS: stack.enter_context(undivided(model))}
            if options.core is None:
                targets[TWO_THREADS] = stack.enter_context(undivided(model, threads=2))
            targets[SMALL_CHUNKS] = stack.enter_context(undivided(model, chunk_size=128))
        comparison = Comparison(model_of(targets[OURS].url), targets, options.rounds)
        asyncio.run(comparison.run())
    missed = comparison.missed()
    print("\n" + "\n".join(missed or ["every target is met"]))
    if options.json is not None:
        body = {"options": {k: plain(v) for k, v in vars(options).items()}, "parts": comparison.parts,
                "missed": missed, "rounds": comparison.raw}  # fmt: skip
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
