"""The measurement itself: everything in turn, round by round, so that what the machine does else hits all alike.

In: pairs that are up. Out: samples. Before the first round everything runs once, and whether the bytes arrived
is checked then: a fast transfer of nothing must not become a figure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from .messages import ComputeStart, ComputeStop, Cpu, CpuSeconds, Done, Worked
from .pairs import REFERENCE, Pair, Stopped
from .shape import Shape

WHOLE, CHUNKS = "whole", "chunks"
REPEAT_BYTES, MOST_REPEATS = 128 << 20, 10  # small prompts are repeated inside a round
IDLE_SECONDS = 3.0
SLICE_SECONDS = 1.0
PACED_SECONDS = 2.0
COMPUTE_THREADS = 2
PACE = 100e6  # bytes per second: several times the KV that a CPU computes in that time
PACED_TOKENS = 256  # small enough for several in a slice

Say = Callable[[str], None]


class Sample(msgspec.Struct, frozen=True):
    backend: str  # or "reference"
    method: str
    tokens: int
    round: int
    seconds: float
    cpu_seconds: float  # of both processes


class ComputeSlice(msgspec.Struct, frozen=True):
    """A pair of slices, one after the other, on the sender's side."""

    backend: str
    round: int
    without_engine: float  # matrix products per second in a process without any engine
    alone: float  # in the sender, its engine idle
    beside_transfers: float  # back to back, as fast as they go
    transferred_per_second: float  # bytes, meanwhile
    beside_paced: float  # at a rate of `PACE`


class Tail(msgspec.Struct, frozen=True):
    """What remained to be moved when the last chunk's forward had ended."""

    backend: str
    push: str  # after each "layer", each "chunk", or at the "end"
    tokens: int
    round: int
    seconds: float


class IdleCpu(msgspec.Struct, frozen=True):
    backend: str
    sender: float  # processor seconds per second
    receiver: float


def items(pairs: Sequence[Pair], tokens: Sequence[int], chunk: int) -> list[tuple[Pair, str, int]]:
    """What a round consists of. A prompt that is one chunk anyway is not measured twice."""
    found: list[tuple[Pair, str, int]] = []
    for count in tokens:
        for pair in pairs:
            methods = list(pair.methods)
            if pair.name != REFERENCE:
                methods = [WHOLE, *([CHUNKS] if count > chunk else []), *methods]
            found += [(pair, method, count) for method in methods]
    return found


def move(pair: Pair, method: str, tokens: int, chunk: int) -> tuple[float, float]:
    if method in (WHOLE, CHUNKS):
        return pair.prompt(tokens, tokens if method == WHOLE else chunk)
    return pair.direct(method, tokens)


def check(pair: Pair, method: str, tokens: int, chunk: int) -> None:
    pair.poison()
    move(pair, method, tokens, chunk)
    if method == "memcpy":  # into memory that only the sender sees
        return
    if wrong := pair.wrong_writes(tokens, in_one_piece=method == "tcp"):
        raise Stopped(f"{pair.name} {method}: {wrong} writes of a prompt of {tokens} positions did not arrive")


def rounds(
    pairs: Sequence[Pair], shape: Shape, tokens: Sequence[int], chunk: int, count: int, say: Say
) -> Iterator[Sample]:
    everything = items(pairs, tokens, chunk)
    for item in everything:
        check(*item, chunk)
    say("everything arrives as it was sent")
    for number in range(count):
        order = list(everything)
        random.Random(number).shuffle(order)  # nothing always follows the same; equal in every run
        for pair, method, prompt in order:
            for _ in range(max(1, min(MOST_REPEATS, REPEAT_BYTES // shape.prompt_bytes(prompt)))):
                seconds, cpu = move(pair, method, prompt, chunk)
                yield Sample(pair.name, method, prompt, number, seconds, cpu)
        say(f"round {number + 1} of {count}")


def idle_cpu(pairs: Sequence[Pair]) -> list[IdleCpu]:
    """All at once: those that are idle cannot disturb each other."""
    before, began = [_cpu(pair) for pair in pairs], time.monotonic()
    time.sleep(IDLE_SECONDS)
    after, took = [_cpu(pair) for pair in pairs], time.monotonic() - began
    return [
        IdleCpu(pair.name, *((last - first) / took for first, last in zip(*both, strict=True)))
        for pair, *both in zip(pairs, before, after, strict=True)
        if pair.name != REFERENCE
    ]


def compute(
    reference: Pair, pairs: Sequence[Pair], shape: Shape, tokens: int, chunk: int, count: int, say: Say
) -> Iterator[ComputeSlice]:
    for pair in pairs:
        pair.prompt(tokens, chunk)
        _slice(pair, 0.0, lambda: None)  # imports torch
    _slice(reference, 0.0, lambda: None)
    for number in range(count):
        without = _slice(reference, SLICE_SECONDS, lambda: time.sleep(0.01))[0]
        for pair in pairs:
            alone = _slice(pair, SLICE_SECONDS, lambda: time.sleep(0.01))[0]
            beside, moved, took = _slice(pair, SLICE_SECONDS, lambda pair=pair: pair.prompt(tokens, chunk))  # type: ignore[misc]
            rate = moved * shape.prompt_bytes(tokens) / took
            paced = _slice(pair, PACED_SECONDS, _paced(pair, shape, min(tokens, PACED_TOKENS), chunk))[0]
            again = _slice(pair, SLICE_SECONDS, lambda: time.sleep(0.01))[0]
            yield ComputeSlice(pair.name, number, without, (alone + again) / 2, beside, rate, paced)
        say(f"compute, round {number + 1} of {count}")


def tails(pairs: Sequence[Pair], tokens: int, chunk: int, layer_seconds: float, count: int, say: Say) -> Iterator[Tail]:
    pushes = ("layer", "chunk", "end")
    for number in range(count):
        order = [(pair, push) for pair in pairs for push in pushes]
        random.Random(number).shuffle(order)
        for pair, push in order:
            yield Tail(pair.name, push, tokens, number, pair.tail(tokens, chunk, push, layer_seconds))
        say(f"overlap, round {number + 1} of {count}")


def per_round(samples: Sequence[Sample], backend: str, method: str, tokens: int) -> dict[int, float]:
    """Seconds: the median of a round's repeats."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        if (sample.backend, sample.method, sample.tokens) == (backend, method, tokens):
            found.setdefault(sample.round, []).append(sample.seconds)
    return {number: median(seconds) for number, seconds in found.items()}


def _cpu(pair: Pair) -> tuple[float, float]:
    for process in pair.processes:
        process.ask(Cpu())
    sender, receiver = (process.answer(CpuSeconds).seconds for process in pair.processes)
    return sender, receiver


def _paced(pair: Pair, shape: Shape, tokens: int, chunk: int) -> Callable[[], object]:
    """Hands over prompts at the rate of `PACE`."""
    began, moved = time.monotonic(), 0

    def once() -> None:
        nonlocal moved
        pair.prompt(tokens, chunk)
        moved += shape.prompt_bytes(tokens)
        time.sleep(max(0.0, began + moved / PACE - time.monotonic()))

    return once


def _slice(pair: Pair, seconds: float, meanwhile: Callable[[], object]) -> tuple[float, int, float]:
    """Products per second, how often `meanwhile` was done, and for how long."""
    pair.sender.ask(ComputeStart(COMPUTE_THREADS))
    pair.sender.answer(Done)
    began, times = time.monotonic(), 0
    while times == 0 or time.monotonic() - began < seconds:
        meanwhile()
        times += 1
    took = time.monotonic() - began
    pair.sender.ask(ComputeStop())
    return pair.sender.answer(Worked).per_second, times, took
