"""One run against one server: plan, bodies, warm-up, load. The same for `serve` and `compare`.

In: parsed options, a URL, a seed. Out: the records and what the run was. Raises `RunError` with a message for people.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, repeat
from random import Random

from bench import arrivals, traces, workload
from bench.bodies import Manner, PromptFileError, make_bodies, read_prompts
from bench.client import Client
from bench.load import Load, Progress
from bench.prompts import Count, Lexicon, PromptError, ids_between, lexicon_by_asking, lexicon_of, load_tokenizer
from bench.records import Record
from bench.server import ServerCount, ServerError, model_of
from bench.workload import Ask, Planned

_DEFAULT_REQUESTS, _DEFAULT_USERS = 100, 8
_WARM_TOKENS, _WARM_ANSWER = 512, 8
_MOST = 1_000_000  # requests planned for a closed loop that ends by time


class RunError(Exception):
    """The run cannot be made as asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Run:
    model: str
    open_loop: bool
    left_out: int  # rows of a trace that were too long
    records: list[Record]


Watch = Callable[[Progress], None]


def make_plan(options: argparse.Namespace, seed: int) -> tuple[list[Planned], int]:
    """The requests of a run with their moments, and how many rows of a trace were left out. Pure but for files."""
    count = options.requests
    if options.dataset == "trace":
        return _trace_plan(options, count)
    asks = _asks(options, Random(f"{seed}/asks"))
    if is_open(options):
        if count is None and options.duration is None:
            count = _DEFAULT_REQUESTS
        return workload.plan(asks, _due(options, Random(f"{seed}/arrivals")), count, options.duration), 0
    if count is None:
        # What one server can answer in that time is not known; users stop at the time, not at the count.
        count = _DEFAULT_REQUESTS if options.duration is None else min(_MOST, int(100 * options.duration) + 1)
    return workload.plan(asks, repeat(0.0), count, None), 0


def is_open(options: argparse.Namespace) -> bool:
    by_trace = options.dataset == "trace" and options.concurrency is None
    return by_trace or options.rate is not None or options.ramp is not None


@asynccontextmanager
async def opened(options: argparse.Namespace, url: str) -> AsyncIterator[Client]:
    key = options.api_key or os.environ.get("PACELINE_API_KEY") or os.environ.get("OPENAI_API_KEY", "")
    clock = asyncio.get_running_loop().time
    async with Client(url, options.endpoint, key, options.request_timeout, clock) as client:
        yield client


async def run(
    options: argparse.Namespace, url: str, seed: int, watch: Watch | None = None, warm: Callable[[], None] | None = None
) -> Run:
    """`watch` is called about once a second while the load is on, `warm` once before it, after the warm-up."""
    try:
        plan, left_out = make_plan(options, seed)
        async with opened(options, url) as client:
            model = options.model or await model_of(client)
            first = _warmup(options)
            bodies = await _bodies(options, client, model, seed, [*first, *(planned.ask for planned in plan)])
            for body in bodies[: len(first)]:
                exchange = await client.send(body)
                if exchange.error:
                    raise RunError(f"the first request failed ({exchange.error}): {exchange.reason}")
            if warm is not None:
                warm()
            load = Load(client.send, plan, bodies[len(first) :])
            watching = asyncio.create_task(_watch(load.progress, watch)) if watch is not None else None
            try:
                if is_open(options):
                    records = await load.open_loop(options.max_in_flight)
                else:
                    records = await load.closed_loop(options.concurrency or _DEFAULT_USERS, options.duration)
            finally:
                if watching is not None:
                    watching.cancel()
    except (traces.TraceError, PromptError, PromptFileError, ServerError) as error:
        raise RunError(str(error)) from error
    return Run(model, is_open(options), left_out, records)


async def _watch(progress: Progress, watch: Watch) -> None:
    while True:
        await asyncio.sleep(1.0)
        watch(progress)


def _trace_plan(options: argparse.Namespace, count: int | None) -> tuple[list[Planned], int]:
    if options.trace is None:
        raise RunError("--dataset trace needs --trace FILE")
    rows = traces.read_trace(options.trace)
    most = options.max_input, options.max_output
    asks = traces.replay(rows, traces.Scale(options.input_scale, options.output_scale, options.time_scale, *most))
    if not asks:
        raise RunError(f"every request of {options.trace} is longer than --max-input {options.max_input}")
    due, what = zip(*asks, strict=True)
    if options.rate is not None or options.ramp is not None:
        due = _due(options, Random(f"{options.seed}/arrivals"))  # type: ignore[assignment]
    return workload.plan(what, due, count or len(asks), options.duration), len(rows) - len(asks)


def _asks(options: argparse.Namespace, chance: Random) -> Iterator[Ask]:
    match options.dataset:
        case "random":
            return workload.random_asks(chance, options.input, options.output)
        case "prefix":
            return workload.prefixed_asks(chance, options.groups, options.prefix, options.input, options.output)
    if options.prompts is None:
        raise RunError("--dataset file needs --prompts FILE")
    try:
        lines = options.prompts.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{options.prompts} cannot be read: {error}") from error
    return cycle(read_prompts(lines, options.endpoint, options.output.high))


def _due(options: argparse.Namespace, chance: Random) -> Iterator[float]:
    if options.ramp is not None:
        return arrivals.ramp(chance, options.ramp)
    if options.arrival == "constant":
        return arrivals.constant(options.rate)
    return arrivals.gamma(chance, options.rate, options.burstiness)


def _warmup(options: argparse.Namespace) -> list[Ask]:
    """Random prompts of moderate length: they share no prefix with the run."""
    tokens = min(options.input.high, _WARM_TOKENS)
    return [Ask((workload.Segment(f"warm{number}", tokens),), _WARM_ANSWER) for number in range(options.warmup)]


async def _bodies(
    options: argparse.Namespace, client: Client, model: str, seed: int, asks: Sequence[Ask]
) -> list[bytes]:
    as_ids = options.endpoint == "completions" and options.prompt_as != "text"
    if options.prompt_as == "ids" and options.endpoint == "chat":
        raise RunError("chat takes no token ids; leave out --prompt-as ids, or use --endpoint completions")
    lexicon: Lexicon | None = None
    count: Count | None = None
    if any(isinstance(ask.prompt, tuple) for ask in asks):
        lexicon, count = await _lexicon(options, client, model, as_ids)
    manner = Manner(options.endpoint, model, as_ids, options.plain, options.ignore_eos, options.extra_body)
    return await make_bodies(asks, manner, seed, lexicon, count)


async def _lexicon(
    options: argparse.Namespace, client: Client, model: str, as_ids: bool
) -> tuple[Lexicon, Count | None]:
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)

        async def local(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False).ids)

        return lexicon_of(tokenizer), local
    if as_ids:
        return ids_between(*options.token_ids), None
    count = ServerCount(client, model)
    return await lexicon_by_asking(count), count
