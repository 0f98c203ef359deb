"""Our figures beside those of an independent client, NVIDIA's aiperf, in one run against one server.

    python -m bench.against_aiperf --aiperf ~/.cache/paceline/clients/aiperf/bin/aiperf

In: aiperf's command, in an environment of its own. Both put the same kind of load on the same server at the same time,
with as many users each, so that whatever the machine does happens to both; ours is counted over the time in which
aiperf's requests begin. The server is a real gateway in front of scripted instances, which keep a pace of their own;
`--cluster "OPTIONS"` asks a cluster of `paceline up` instead. Out: both clients' figures and their ratios. Exit code 1
if a ratio is more than 2 % from 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from bench.bodies import Manner, make_bodies, read_prompts
from bench.client import Client
from bench.load import Load
from bench.local_cluster import started_cluster
from bench.prompts import COMMON_WORDS
from bench.records import Record
from bench.scripted_gateway import scripted_gateway
from bench.summary import Window, distribution, summarise
from bench.workload import Planned

TOLERANCE = 0.02
TOKEN_RATE, FIRST_AFTER = 25.0, 0.18  # of the scripted instances
MOST_SECONDS = 300.0
# Its inter_token_latency is a mean over each request's tokens after the first: our TPOT.
METRICS = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
Figures = dict[str, float]


def write_prompts(path: Path, count: int, words: int) -> None:
    chance = Random(1)
    with path.open("w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(chance.choices(COMMON_WORDS, k=words))}) + "\n")


async def both(url: str, prompts: Path, options: argparse.Namespace, folder: Path) -> tuple[Figures, Figures]:
    """Ours goes on for as long as aiperf runs."""
    asks = read_prompts(prompts.read_text().splitlines(), "chat", options.output)
    manner = Manner("chat", options.model, as_ids=False, plain=False, ignore_eos=True, extra={})
    plan = [Planned(index, 0.0, ask) for index, ask in enumerate(islice(cycle(asks), 100 * len(asks)))]
    bodies = await make_bodies([planned.ask for planned in plan], manner, 0, None, None)
    async with Client(url, "chat", "", MOST_SECONDS, asyncio.get_running_loop().time) as client:
        await asyncio.gather(*map(client.send, bodies[: options.users]))  # warms up
        load = Load(client.send, plan, bodies)
        begin = time.time()
        ours = asyncio.create_task(load.closed_loop(options.users))
        rows, summary = await ask_aiperf(url, prompts, options, folder)
        ours.cancel()
        with suppress(asyncio.CancelledError):
            await ours
    starts = [row["metadata"]["request_start_ns"] / 1e9 - begin for row in rows]
    window = Window("aiperf's", min(starts), max(starts))
    found = summarise(load.progress.records, window, {})
    if found.failed or found.completed < len(rows) / 2:
        raise SystemExit(f"against_aiperf: of our requests {found.completed} are whole: {found.errors}")
    own, other = Figures(), Figures()
    for name, metric in METRICS.items():
        told = distribution([row["metrics"][metric]["value"] for row in rows])
        assert told is not None
        for kind in ("mean", "p50", "p90"):
            own[f"{name} {kind}, ms"] = getattr(found.latency_ms[name], kind)
            other[f"{name} {kind}, ms"] = getattr(told, kind)
    own["output tokens/s"] = output_of(load.progress.records, window)
    other["output tokens/s"] = float(summary["output_token_throughput"]["avg"])
    return own, other


def output_of(records: Sequence[Record], window: Window) -> float:
    """As aiperf counts it: all tokens of the requests that began in the window, until the last of them ended."""
    inside = [record for record in records if window.begin <= record.scheduled <= window.end]
    first, last = min(r.scheduled for r in inside), max(r.ended for r in inside)
    return sum(record.output_tokens for record in inside) / (last - first)


async def ask_aiperf(
    url: str, prompts: Path, options: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Its record of each request, and its summary."""
    fixed = {"max_tokens": options.output, "min_tokens": options.output, "ignore_eos": True, "temperature": 0}
    command = [
        str(options.aiperf), "profile", "--model", options.model, "--url", url, "--endpoint-type", "chat",
        "--streaming", "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
        "--dataset-sampling-strategy", "sequential", "--concurrency", str(options.users),
        "--request-count", str(options.requests), "--workers-max", "1", "--extra-inputs", json.dumps(fixed),
        "--use-server-token-count", "--tokenizer", "lab/tokenizer", "--no-gpu-telemetry", "--no-server-metrics",
        "--ui", "none", "--output-artifact-dir", str(folder / "artifacts"),
    ]  # fmt: skip
    home = tokenizer_cache(options.tokenizer, folder / "hf")
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with (folder / "aiperf.log").open("w+") as log:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        try:
            await asyncio.wait_for(process.wait(), MOST_SECONDS)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        log.seek(0)
        said = log.read()
    artifacts = folder / "artifacts"
    records, summary = (list(artifacts.rglob(name)) for name in ("profile_export.jsonl", "profile_export_aiperf.json"))
    if process.returncode or not records or not summary:
        raise SystemExit(f"against_aiperf: aiperf failed ({process.returncode}): {said[-2000:]}")
    rows = [json.loads(line) for line in records[0].read_text().splitlines()]
    return [row for row in rows if not row.get("error")], json.loads(summary[0].read_text())


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
    parser.add_argument("--requests", type=int, default=96, help="of aiperf (default: 96)")
    parser.add_argument("--users", type=int, default=4, help="at a time, of each client (default: 4)")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer (default: 64)")
    options = parser.parse_args()
    if not options.aiperf.is_file():
        raise SystemExit(f"against_aiperf: no aiperf at {options.aiperf}: pip install aiperf==0.13.0 in a venv there")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name, server(options) as url:
        prompts = Path(name) / "prompts.jsonl"
        write_prompts(prompts, options.requests, 100)
        ours, theirs = asyncio.run(both(url, prompts, options, Path(name)))
    print(f"{'figure':18} {'ours':>10} {'aiperf':>10} {'ratio':>8}")
    worst = 0.0
    for figure, own in ours.items():
        other = theirs[figure]
        worst = max(worst, abs(own / other - 1))
        print(f"{figure:18} {own:10.3f} {other:10.3f} {own / other:8.4f}")
    print(f"at most {100 * worst:.2f} % apart; allowed are {100 * TOLERANCE:g} %")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
