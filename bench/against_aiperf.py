"""Our figures beside those of an independent client, NVIDIA's aiperf, in one run against one server.

    python -m bench.against_aiperf            # a real gateway in front of scripted instances
    python -m bench.against_aiperf --cluster "--prefill-pp 1 --decode-pp 1"

In: aiperf's command, in an environment of its own. Both put the same kind of load on the same server at the same time,
with as many users each, so that whatever the machine does happens to both; ours is counted over the time in which
aiperf's requests begin. Each client goes through a relay (`bench.relay`), a third witness that sees when its requests
came and their tokens went. Out: what each client says; `off`, how far that is from what its relay saw of the same
requests, in percent; `ratio`, ours to aiperf's; and `alike`, the ratio of what they would say of the same requests,
which leaves out that the server did not do the same for both. Exit code 1 if `alike` is more than 2 % from 1 anywhere.
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

import msgspec

from bench.bodies import Manner, make_bodies, read_prompts
from bench.client import Client
from bench.load import Load
from bench.local_cluster import started_cluster
from bench.prompts import COMMON_WORDS
from bench.records import Record
from bench.relay import relayed
from bench.scripted_gateway import scripted_gateway
from bench.summary import distribution, of_request
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


async def both(
    ours_at: str, aiperf_at: str, prompts: Path, options: argparse.Namespace, folder: Path
) -> tuple[list[Record], list[dict[str, Any]]]:
    """Our records, in order, and aiperf's rows; ours goes on for as long as aiperf runs. Moments are monotonic."""
    asks = read_prompts(prompts.read_text().splitlines(), "chat", options.output)
    manner = Manner("chat", options.model, as_ids=False, plain=False, ignore_eos=True, extra={})
    plan = [Planned(index, 0.0, ask) for index, ask in enumerate(islice(cycle(asks), 100 * len(asks)))]
    bodies = await make_bodies([planned.ask for planned in plan], manner, 0, None, None)
    async with Client(ours_at, "chat", "", MOST_SECONDS, time.monotonic) as client:
        await asyncio.gather(*map(client.send, bodies[: options.users]))  # warms up
        load = Load(client.send, plan, bodies)
        begin = time.monotonic()
        ours = asyncio.create_task(load.closed_loop(options.users))
        rows = await ask_aiperf(aiperf_at, prompts, options, folder)
        ours.cancel()
        with suppress(asyncio.CancelledError):
            await ours
    records = [at_moments(record, begin) for record in load.progress.records]
    return sorted(records, key=lambda record: record.scheduled), rows


def at_moments(record: Record, begin: float) -> Record:
    """With moments of the clock instead of seconds from the start."""
    chunks = tuple((at + begin, tokens) for at, tokens in record.chunks)
    return msgspec.structs.replace(
        record, scheduled=record.scheduled + begin, sent=record.sent + begin, ended=record.ended + begin, chunks=chunks
    )


def figures_of_records(records: Sequence[Record]) -> Figures:
    each = [of_request(record) for record in records]
    seconds = max(record.ended for record in records) - min(record.scheduled for record in records)
    rate = sum(record.output_tokens for record in records) / seconds
    return figures_of({name: [found[name] for found in each] for name in METRICS}, rate)


def figures_of_rows(rows: Sequence[dict[str, Any]]) -> Figures:
    """aiperf's, from what it says of each request."""
    values = {name: [row["metrics"][metric]["value"] for row in rows] for name, metric in METRICS.items()}
    seconds = (max(map(ended, rows)) - min(map(began, rows))) / 1e9
    return figures_of(values, sum(row["metrics"]["output_sequence_length"]["value"] for row in rows) / seconds)


def began(row: dict[str, Any]) -> int:
    """Nanoseconds of the wall clock."""
    moment: int = row["metadata"]["request_start_ns"]
    return moment


def ended(row: dict[str, Any]) -> int:
    moment: int = row["metadata"]["request_end_ns"]
    return moment


def figures_of(values: dict[str, list[float]], rate: float) -> Figures:
    """`rate`: all tokens of the requests, until the last of them ended."""
    found = Figures()
    for name, of_each in values.items():
        told = distribution(of_each)
        assert told is not None
        for kind in ("mean", "p50", "p90"):
            found[f"{name} {kind}, ms"] = getattr(told, kind)
    found["output tokens/s"] = rate
    return found


async def ask_aiperf(url: str, prompts: Path, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Its record of each request."""
    fixed = {"max_tokens": options.output, "min_tokens": options.output, "ignore_eos": True, "temperature": 0}
    command = [
        str(options.aiperf), "profile", "--model", options.model, "--url", url, "--endpoint-type", "chat",
        "--streaming", "--warmup-request-count", str(2 * options.users),
        "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
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
    records = next((folder / "artifacts").rglob("profile_export.jsonl"), None)
    if process.returncode or records is None:
        raise SystemExit(f"against_aiperf: aiperf failed ({process.returncode}): {said[-2000:]}")
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    rows = [row for row in rows if row["metadata"].get("benchmark_phase") == "profiling"]
    whole = [row for row in rows if not row.get("error")]
    if len(whole) < options.requests:
        raise SystemExit(f"against_aiperf: {len(whole)} of {options.requests} of aiperf's answers are whole")
    return whole


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
        to_wall = time.time() - time.monotonic()
        with relayed(url) as ours, relayed(url) as theirs:
            records, rows = asyncio.run(both(ours.url, theirs.url, prompts, options, Path(name)))
    first, last = (moment / 1e9 - to_wall for moment in (min(map(began, rows)), max(map(began, rows))))
    # Requests reach a relay in the order in which they were begun, after those that warm up.
    pairs = list(zip(records, ours.records[options.users :], strict=False))
    inside = [pair for pair in pairs if first <= pair[0].scheduled <= last]
    if len(inside) < len(rows) / 2 or not all(own.ok and there.ok for own, there in inside):
        raise SystemExit(f"against_aiperf: too few of our {len(inside)} requests are whole")
    return compare(
        figures_of_records([own for own, _ in inside]),
        figures_of_records([there for _, there in inside]),
        figures_of_rows(rows),
        figures_of_records(theirs.records[-len(rows) :]),
    )


def compare(ours: Figures, at_ours: Figures, aiperf: Figures, at_aiperf: Figures) -> int:
    """Prints the table; 1 if a figure is too far apart."""
    print(f"{'figure':18} {'ours':>10} {'off, %':>8} {'aiperf':>10} {'off, %':>8} {'ratio':>8} {'alike':>8}")
    worst = 0.0
    for figure, own in ours.items():
        other = aiperf[figure]
        our_off, their_off = own / at_ours[figure], other / at_aiperf[figure]
        alike = our_off / their_off
        worst = max(worst, abs(alike - 1))
        told = (own, 100 * (our_off - 1), other, 100 * (their_off - 1), own / other, alike)
        print(f"{figure:18} " + "{:10.3f} {:8.2f} {:10.3f} {:8.2f} {:8.4f} {:8.4f}".format(*told))
    print(f"at most {100 * worst:.2f} % apart; allowed are {100 * TOLERANCE:g} %")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
