"""What an option costs in time to the first token: clusters side by side, asked in turn.

    python -m bench.ttft --tokens 1024 -- "--checksum none" "--checksum xxh3" "--push chunk"

In: sets of options of `paceline up`, the first one being what the others are compared with. Out: per set the
median TTFT in milliseconds, and the median of the rounds' own ratios to the first set. Each set has a cluster
of its own; all run at once and are asked one after the other, in another order each round, so that what slows
the machine hits all alike. Every prompt is new.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from bench.local_cluster import started_cluster

TIMEOUT = 300.0
FIRST_ID, LAST_ID = 1000, 40000  # token ids that mean something in the default model


@dataclass(frozen=True, slots=True)
class Row:
    options: str
    milliseconds: float
    ratio: float


def model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT) as answer:
        name: str = json.load(answer)["data"][0]["id"]
        return name


def ttft(url: str, model: str, prompt: list[int]) -> float:
    """Seconds from the request until the first token."""
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "min_tokens": 2, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = time.monotonic() - began
                answer.read()
                return first
    raise SystemExit(f"no token from {url}")


def table(sets: Sequence[str], rounds: Sequence[Sequence[float]]) -> list[Row]:
    """`rounds[i][j]`: seconds of set j in round i."""
    rows = []
    for place, options in enumerate(sets):
        own = [seconds[place] for seconds in rounds]
        ratio = median(seconds[place] / seconds[0] for seconds in rounds)
        rows.append(Row(options or "(defaults)", 1e3 * median(own), ratio))
    return rows


def measure(sets: Sequence[str], tokens: int, count: int) -> list[Row]:
    chance = random.Random(tokens)
    with ExitStack() as stack:
        urls = [stack.enter_context(started_cluster(shlex.split(options))).url for options in sets]
        model = model_of(urls[0])
        rounds: list[list[float]] = []
        for number in range(count + 1):
            prompt = [chance.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]
            seconds = [0.0] * len(urls)
            for place in chance.sample(range(len(urls)), len(urls)):
                seconds[place] = ttft(urls[place], model, prompt)
            if number:  # the first one is for warming up
                rounds.append(seconds)
                print(f"round {number} of {count}", file=sys.stderr, flush=True)
    return table(sets, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ttft", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt (default: 1024)")
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument("sets", nargs="+", metavar="OPTIONS", help='options of `paceline up`, quoted; "" for none')
    options = parser.parse_args()
    for row in measure(options.sets, options.tokens, options.rounds):
        print(f"{row.milliseconds:9.1f} ms  {row.ratio:6.3f} x  {row.options}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
