"""Prompts that arrive while answers stream: what each does to the other.

In: a server, how many streams, prompts with their moments. Out: the gaps between the streams' tokens from the first
moment to the last, and the records of the prompts. The streams are there before the first prompt and outlast the
last moment; then they are hung up on. A gap that is still open then is not counted, which favours who stalls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.bodies import Manner, body
from bench.client import Client, Exchange
from bench.load import Load, Send
from bench.records import Record
from bench.summary import Distribution, distribution
from bench.workload import Ask, Planned

SETTLE = 2.0  # seconds in which the streams get their first tokens
STREAM_PROMPT, STREAM_TOKENS = 32, 1200
PROMPT_ANSWER = 2  # tokens: the second one comes from where the KV went
FIRST_ID, LAST_ID = 1000, 30000
_PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Mixed:
    gaps: Distribution  # ms, of the streams
    prompts: list[Record]

    def ttft(self, tokens: int) -> float:
        """Mean ms of the prompts of that length."""
        found = [record.ttft for record in self.prompts if record.prompt_tokens == tokens and record.ttft is not None]
        return 1e3 * sum(found) / len(found)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Prompt lengths, and the moment at which each is due, in seconds after the streams have settled."""

    lengths: tuple[int, ...]
    due: tuple[float, ...]
    seconds: float

    @classmethod
    def spaced(cls, lengths: Sequence[int], seconds_of: dict[int, float], share: float) -> Schedule:
        """`share` of the time goes by in computing prompts, if each takes as long as `seconds_of` its length says."""
        due, now = [], 0.0
        for length in lengths:
            due.append(now)
            now += seconds_of[length] / share
        return cls(tuple(lengths), tuple(due), now)


async def mixed(url: str, model: str, streams: int, schedule: Schedule, seed: int) -> Mixed:
    """Raises `SystemExit` if a request failed, a stream ended early or had not begun when the prompts came."""
    clock = asyncio.get_running_loop().time
    async with (
        Client(url, "completions", "", SETTLE + schedule.seconds, clock) as streaming,
        Client(url, "completions", "", _PATIENCE, clock) as asking,
    ):
        return await mix(streaming.send, asking.send, model, streams, schedule, seed)


async def mix(streaming: Send, asking: Send, model: str, streams: int, schedule: Schedule, seed: int) -> Mixed:
    """What is sent by `streaming` times out when the schedule is over."""
    chance = Random(seed)
    began = asyncio.get_running_loop().time()
    prompts = [Planned(i, SETTLE + at, Ask("", PROMPT_ANSWER)) for i, at in enumerate(schedule.due)]
    bodies = [_body(chance, model, length, PROMPT_ANSWER) for length in schedule.lengths]
    opens = [_body(chance, model, STREAM_PROMPT, STREAM_TOKENS) for _ in range(streams)]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(_whole(streaming, each)) for each in opens]
        records = await Load(asking, prompts, bodies).open_loop()
    exchanges = [task.result() for task in running]
    # When this is answered, nothing is left of the streams: who asks next finds the server idle.
    probe = await asking(_body(chance, model, STREAM_PROMPT, 1))
    failed = [f"{r.error}: {r.reason}" for r in records if not r.ok] + [probe.reason for _ in range(bool(probe.error))]
    failed += [f"a stream: {e.error or 'ended before its time'}: {e.reason}" for e in exchanges if e.error != "timeout"]
    if failed:
        raise SystemExit(f"bench.undivided: {failed[0]}")
    window = began + SETTLE, began + SETTLE + schedule.seconds
    found = distribution([1e3 * gap for exchange in exchanges for gap in _gaps(exchange, *window)])
    if found is None:
        raise SystemExit("bench.undivided: the streams had no two tokens while prompts came")
    return Mixed(found, records)


async def _whole(send: Send, body: bytes) -> Exchange:
    return await send(body)


def _gaps(exchange: Exchange, begin: float, end: float) -> list[float]:
    moments = [at for at, tokens in exchange.answer.chunks for _ in range(tokens)]
    if not moments or moments[0] > begin:
        raise SystemExit(f"bench.undivided: a stream had no token within its first {SETTLE:g} s")
    return [b - a for a, b in zip(moments, moments[1:], strict=False) if begin <= b <= end]


def _body(chance: Random, model: str, tokens: int, answer: int) -> bytes:
    prompt = [chance.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]
    return body(Ask("", answer), prompt, Manner("completions", model, True, False, True, {}))
