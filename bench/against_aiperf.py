"""Our figures beside those of an independent client, NVIDIA's aiperf, for the same requests to the same server.

    python -m bench.against_aiperf --aiperf ~/.cache/paceline/clients/aiperf/bin/aiperf

In: aiperf's command, in an environment of its own. A real gateway in front of scripted instances is asked by both in
turn, in the order A B B A: instances with a pace of their own, because two clients can agree only about a server that
does the same twice; `--cluster "OPTIONS"` asks a cluster of `paceline up` instead. Out: both clients' figures and the
ratios of their medians over the runs. Exit code 1 if a ratio is more than 2 % from 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from bench.local_cluster import started_cluster
from bench.options import add_serve
from bench.prompts import COMMON_WORDS
from bench.run import run
from bench.scripted_gateway import scripted_gateway
from bench.summary import summarise, whole_run

TOLERANCE = 0.02
TOKEN_RATE, FIRST_AFTER = 25.0, 0.18  # of the scripted instances
MOST_SECONDS = 300.0
# Ours → aiperf's metric. Its inter_token_latency is a mean over each request's tokens after the first: our TPOT.
FIGURES = {
    "TTFT mean, ms": ("time_to_first_token", "avg"),
    "TTFT p50, ms": ("time_to_first_token", "p50"),
    "TPOT mean, ms": ("inter_token_latency", "avg"),
    "E2E mean, ms": ("request_latency", "avg"),
    "E2E p90, ms": ("request_latency", "p90"),
    "requests/s": ("request_throughput", "avg"),
    "output tokens/s": ("output_token_throughput", "avg"),
}
Figures = dict[str, float]


def write_prompts(path: Path, count: int, words: int) -> None:
    chance = Random(1)
    with path.open("w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(chance.choices(COMMON_WORDS, k=words))}) + "\n")


def ask_ours(url: str, prompts: Path, options: argparse.Namespace) -> Figures:
    parser = argparse.ArgumentParser()
    add_serve(parser)
    ours = parser.parse_args(
        ["--url", url, "--endpoint", "chat", "--dataset", "file", "--prompts", str(prompts), "--warmup", "0",
         "--output", str(options.output), "--requests", str(options.requests), "--concurrency", str(options.users)]
    )  # fmt: skip
    records = asyncio.run(run(ours, url, 0)).records
    summary = summarise(records, whole_run(records), {})
    if summary.failed:
        raise SystemExit(f"against_aiperf: requests of ours failed: {summary.errors}")
    latency = summary.latency_ms
    return dict(
        zip(
            FIGURES,
            (
                latency["ttft"].mean, latency["ttft"].p50, latency["tpot"].mean, latency["e2e"].mean,
                latency["e2e"].p90, summary.request_rate, summary.output_tokens_per_s,
            ),
            strict=True,
        )
    )  # fmt: skip


def ask_aiperf(url: str, prompts: Path, options: argparse.Namespace, folder: Path) -> Figures:
    home = tokenizer_cache(options.tokenizer, folder / "hf")
    command = [
        str(options.aiperf), "profile", "--model", options.model, "--url", url, "--endpoint-type", "chat",
        "--streaming", "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
        "--dataset-sampling-strategy", "sequential", "--concurrency", str(options.users),
        "--request-count", str(options.requests), "--workers-max", "1",
        "--extra-inputs", json.dumps({"max_tokens": options.output, "min_tokens": options.output, "ignore_eos": True,
                                      "temperature": 0}),
        "--use-server-token-count", "--tokenizer", "lab/tokenizer", "--no-gpu-telemetry", "--no-server-metrics",
        "--ui", "none", "--output-artifact-dir", str(folder / "artifacts"),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        command, check=False, env=environment, cwd=folder, capture_output=True, text=True, timeout=MOST_SECONDS
    )
    files = list((folder / "artifacts").rglob("profile_export_aiperf.json"))
    if done.returncode or not files:
        raise SystemExit(f"against_aiperf: aiperf failed ({done.returncode}): {(done.stdout + done.stderr)[-2000:]}")
    told: dict[str, Any] = json.loads(files[0].read_text())
    return {name: float(told[metric][kind]) for name, (metric, kind) in FIGURES.items()}


def tokenizer_cache(tokenizer: Path, home: Path) -> Path:
    """aiperf offline takes no path, only a name that it finds in a cache of Hugging Face's layout."""
    snapshot = home / "hub" / "models--lab--tokenizer" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in tokenizer.iterdir():
        if file.suffix != ".safetensors":
            (snapshot / file.name).symlink_to(file.absolute())
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    return home


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    if options.cluster is not None:
        with started_cluster(shlex.split(options.cluster)) as cluster:
            yield cluster.url
    else:
        with scripted_gateway(TOKEN_RATE, 1, ["--model", str(options.tokenizer)], first_after=FIRST_AFTER) as gateway:
            yield gateway.url


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline"
    parser = argparse.ArgumentParser(prog="python -m bench.against_aiperf", description=__doc__.splitlines()[0])
    parser.add_argument("--aiperf", type=Path, default=cache / "clients" / "aiperf" / "bin" / "aiperf")
    parser.add_argument("--tokenizer", type=Path, default=cache / "SmolLM2-135M-Instruct", help="folder of the model")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="name of the model at the server")
    parser.add_argument("--cluster", metavar="OPTIONS", help="of `paceline up`: ask a cluster with a model instead")
    parser.add_argument("--rounds", type=int, default=2, help="of two runs each (default: 2)")
    parser.add_argument("--requests", type=int, default=64, help="of each run (default: 64)")
    parser.add_argument("--users", type=int, default=8, help="at a time (default: 8)")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer (default: 64)")
    options = parser.parse_args()
    if not options.aiperf.is_file():
        raise SystemExit(f"against_aiperf: no aiperf at {options.aiperf}: pip install aiperf==0.13.0 in a venv there")
    ours: list[Figures] = []
    theirs: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name, server(options) as url:
        prompts = Path(name) / "prompts.jsonl"
        write_prompts(prompts, options.requests, 100)
        ask_ours(url, prompts, argparse.Namespace(**{**vars(options), "requests": options.users}))  # warms up
        for number in range(options.rounds):
            for who in ("ours", "aiperf") if number % 2 == 0 else ("aiperf", "ours"):
                print(f"round {number + 1} of {options.rounds}: {who}", file=sys.stderr, flush=True)
                if who == "ours":
                    ours.append(ask_ours(url, prompts, options))
                else:
                    with tempfile.TemporaryDirectory(dir=name) as folder:
                        theirs.append(ask_aiperf(url, prompts, options, Path(folder)))
    print(f"{'figure':18} {'ours':>10} {'aiperf':>10} {'ratio':>8}")
    worst = 0.0
    for figure in FIGURES:
        own, other = median(run[figure] for run in ours), median(run[figure] for run in theirs)
        worst = max(worst, abs(own / other - 1))
        print(f"{figure:18} {own:10.3f} {other:10.3f} {own / other:8.4f}")
    print(f"at most {100 * worst:.2f} % apart; allowed are {100 * TOLERANCE:g} %")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
