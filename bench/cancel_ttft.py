"""What cancelled prompts cost the next request: its time to the first token, beside that of an idle cluster.

    python -m bench.cancel_ttft --rounds 9 -- --max-model-len 2048

In: options of `paceline up`. Out: the TTFT of a short prompt on an idle cluster, the time of one chunk, the TTFT of a
short prompt sent right after ten long ones were cancelled before their first token, and how much that is of 1.5 times
idle plus one chunk. Exit code 1 if it is more. Medians over rounds; every prompt is new.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import time
from statistics import median
from urllib.parse import urlsplit

from bench.local_cluster import started_cluster
from bench.ttft import FIRST_ID, LAST_ID, model_of, ttft

CANCELLED = 10
HEAD_START = 0.5  # seconds in which the long prompts are computed before they are cancelled


def fire_and_leave(url: str, model: str, prompts: list[list[int]], seconds: float) -> None:
    """Sends all prompts, waits, and hangs up on all before any has been answered."""
    place = urlsplit(url)
    connections = []
    for prompt in prompts:
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "min_tokens": 2, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        connections.append(connection)
    time.sleep(seconds)
    for connection in connections:
        connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cancel_ttft", description=__doc__.splitlines()[0])
    parser.add_argument("--long", type=int, default=2000, help="tokens of a cancelled prompt (default: 2000)")
    parser.add_argument("--short", type=int, default=16, help="tokens of the request that follows (default: 16)")
    parser.add_argument("--chunk", type=int, default=512, help="as the cluster's --chunk-size (default: 512)")
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of `paceline up`, after --")
    options = parser.parse_args()
    chance = random.Random(options.long)

    def prompt(tokens: int) -> list[int]:
        return [chance.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]

    idle, chunks, after = [], [], []
    with started_cluster(["--chunk-size", str(options.chunk), *options.options]) as cluster:
        url, model = cluster.url, model_of(cluster.url)
        for number in range(options.rounds + 1):
            plain = ttft(url, model, prompt(options.short))
            one, two = (ttft(url, model, prompt(count * options.chunk)) for count in (1, 2))
            fire_and_leave(url, model, [prompt(options.long) for _ in range(CANCELLED)], HEAD_START)
            late = ttft(url, model, prompt(options.short))
            time.sleep(1.0)  # what is left of the cancelled ones ends
            if number:  # the first one is for warming up
                idle.append(plain)
                chunks.append(two - one)
                after.append(late)
                print(f"round {number} of {options.rounds}: {1e3 * plain:.0f}, {1e3 * late:.0f} ms", file=sys.stderr)
    bound = 1.5 * median(idle) + median(chunks)
    print(f"idle {1e3 * median(idle):.0f} ms, one chunk of {options.chunk} {1e3 * median(chunks):.0f} ms")
    print(f"after {CANCELLED} cancelled prompts of {options.long}: {1e3 * median(after):.0f} ms")
    print(f"{median(after) / bound:.2f} of 1.5 x idle + one chunk ({1e3 * bound:.0f} ms)")
    return 0 if median(after) <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
