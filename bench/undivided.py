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
from pathlib import Path
from typing import Any

import msgspec

from bench.compare import Line, interleaved, lines_of, measured_rounds, table
from bench.options import COUNT, add_compare
from bench.serve import plain
from bench.ttft import model_of
from bench.undivided_load import Mixed, Schedule, mixed
from bench.undivided_targets import default_model, on_cores, pair, undivided

MOST_TTFT = 1.03  # of the undivided engine's
LEAST_ITL = 5.0  # the undivided engine's p99 over ours
SHORT, LONG, LONGEST = 128, 1024, 2048
STREAMS = 4
OURS, THEIRS, TWO_THREADS, SMALL_CHUNKS = "disaggregated", "undivided", "2 threads", "chunks of 128"
ALONE = {
    "TTFT, ms": lambda s: s.latency_ms["ttft"].median,
    "second token, ms": lambda s: s.latency_ms["e2e"].median,
}
BESIDE = {f"TTFT of {length}, ms": (lambda m, length=length: m.ttft(length)) for length in (SHORT, LONG)}
MIXED = {
    "ITL p99, ms": lambda m: m.gaps.p99,
    "ITL max, ms": lambda m: m.gaps.max,
    "ITL median, ms": lambda m: m.gaps.median,
    "tokens of streams": lambda m: m.gaps.count,
} | {f"TTFT of {length}, ms": (lambda m, length=length: m.ttft(length)) for length in (LONG, LONGEST)}


class Comparison:
    def __init__(self, model: str, urls: dict[str, str], rounds: int) -> None:
        self.model, self.urls, self.rounds = model, urls, rounds
        self.parts: dict[str, list[Line]] = {}
        self.raw: dict[str, Any] = {}

    async def run(self) -> None:
        both = {name: self.urls[name] for name in (THEIRS, OURS, TWO_THREADS) if name in self.urls}
        await measured_rounds(_options(LONG, 1, 1), self.urls)  # caches, connections
        seconds_of = {}
        for tokens, requests in ((SHORT, 3), (LONG, 1)):
            found = await measured_rounds(_options(tokens, requests, self.rounds), both)
            lines = self._keep(f"alone, prompts of {tokens} tokens", found, ALONE)
            seconds_of[tokens] = max(line.median for line in lines if line.target in (OURS, THEIRS)) / 1e3
        seconds_of[LONGEST] = 2 * seconds_of[LONG]
        light = Schedule.spaced((SHORT, LONG), {length: seconds_of[length] + 0.2 for length in (SHORT, LONG)}, 0.7)
        self._keep("beside a stream", await self._mixed(list(both)[:2], 1, light), BESIDE)
        heavy = Schedule.spaced((LONG, LONGEST), seconds_of, 0.5)
        names = [OURS, *(name for name in self.urls if name != OURS)]
        self._keep(f"{STREAMS} streams, long prompts", await self._mixed(names, STREAMS, heavy), MIXED)

    async def _mixed(self, names: Sequence[str], streams: int, schedule: Schedule) -> list[dict[str, Mixed]]:
        rounds = self.rounds if streams == 1 else -(-self.rounds // 2)

        async def measure(name: str, number: int) -> Mixed:
            found = await mixed(self.urls[name], self.model, streams, schedule, number)
            print(f"round {number + 1} of {rounds}, {streams} streams: {name}", file=sys.stderr, flush=True)
            return found

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


def _options(tokens: int, requests: int, rounds: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_compare(parser)
    lengths = ["--input", str(tokens), "--output", "2"]
    shape = ["--concurrency", "1", "--requests", str(requests), "--rounds", str(rounds), "--warmup", "0"]
    return parser.parse_args(["a=http://", *lengths, *shape])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.undivided", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=COUNT, default=6, help="half as many of the last part (default: 6)")
    parser.add_argument("--core", type=int, help="everything but this client on this one core (default: on all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round here")
    options = parser.parse_args()
    model = default_model()
    with ExitStack() as stack:
        with on_cores({options.core} if options.core is not None else set()):
            urls = {OURS: stack.enter_context(pair(model)), THEIRS: stack.enter_context(undivided(model))}
            if options.core is None:
                urls[TWO_THREADS] = stack.enter_context(undivided(model, threads=2))
            urls[SMALL_CHUNKS] = stack.enter_context(undivided(model, chunk_size=128))
        comparison = Comparison(model_of(urls[OURS]), urls, options.rounds)
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
