"""Samples to figures. In: samples. Out: per prompt length and way of moving it, medians and ratios.

A round's value is the median of its repeats; a figure is the median of the rounds; a ratio is the median of the
rounds' own ratios, so that what hit a whole round cancels out. Ratios are of rates: 0.9 means nine tenths as fast.
`raw` is the backend's own best: the fastest of the ways without ports that its library offers (by the median; the
same one in every round), or its engine alone where there is no library.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from .measure import CHUNKS, WHOLE, ComputeSlice, Sample, Tail, per_round
from .options import BACKENDS
from .pairs import REFERENCE
from .shape import Shape

ENGINE = "engine"
METHODS = ("memcpy", "shm", "tcp", WHOLE, CHUNKS, ENGINE, "window", "batch", "prepped")  # as they are shown


class Figure(msgspec.Struct, frozen=True):
    backend: str
    method: str
    tokens: int
    milliseconds: float
    bytes_per_second: float
    cpu_seconds_per_gigabyte: float


class Ratios(msgspec.Struct, frozen=True):
    """Of a way through the ports (`whole` or `chunks`), or of the engine alone, to what it is compared with."""

    backend: str
    method: str
    tokens: int
    raw_method: str
    to_raw: float
    to_tcp: float
    to_shm: float
    to_memcpy: float


class ComputeFigure(msgspec.Struct, frozen=True):
    """How many times slower the loop runs: 1 is not at all."""

    backend: str
    slowdown_by_idle_engine: float
    slowdown_by_transfers: float
    slowdown_by_paced: float
    bytes_per_second: float


class TailFigure(msgspec.Struct, frozen=True):
    backend: str
    push: str
    tokens: int
    milliseconds: float
    share: float  # of what a push of everything at the end takes; the median of the rounds' own ratios


def figures(samples: Sequence[Sample], shape: Shape) -> list[Figure]:
    keys = dict.fromkeys((sample.tokens, sample.backend, sample.method) for sample in samples)
    found = []
    for tokens, backend, method in sorted(keys, key=_place):
        seconds = median(per_round(samples, backend, method, tokens).values())
        cpu = median(
            one.cpu_seconds for one in samples if (one.tokens, one.backend, one.method) == (tokens, backend, method)
        )
        nbytes = shape.prompt_bytes(tokens)
        found.append(Figure(backend, method, tokens, 1e3 * seconds, nbytes / seconds, cpu / nbytes * 1e9))
    return found


def _place(key: tuple[int, str, str]) -> tuple[int, int, int]:
    tokens, backend, method = key
    return tokens, (REFERENCE, *BACKENDS).index(backend), METHODS.index(method)


def raw_method(found: Sequence[Figure], backend: str, tokens: int) -> str:
    own = [one for one in found if (one.backend, one.tokens) == (backend, tokens)]
    library = [one for one in own if one.method not in (WHOLE, CHUNKS, ENGINE)]
    return min(library or [one for one in own if one.method == ENGINE], key=lambda one: one.milliseconds).method


def ratios(samples: Sequence[Sample], found: Sequence[Figure]) -> list[Ratios]:
    result = []
    for figure in found:
        if figure.method not in (WHOLE, CHUNKS, ENGINE):
            continue
        raw = raw_method(found, figure.backend, figure.tokens)
        against = [(figure.backend, raw), (REFERENCE, "tcp"), (REFERENCE, "shm"), (REFERENCE, "memcpy")]
        ours = per_round(samples, figure.backend, figure.method, figure.tokens)
        values = []
        for backend, method in against:
            theirs = per_round(samples, backend, method, figure.tokens)
            values.append(median(theirs[number] / seconds for number, seconds in ours.items()))
        result.append(Ratios(figure.backend, figure.method, figure.tokens, raw, *values))
    return result


def tail_figures(samples: Sequence[Tail]) -> list[TailFigure]:
    seconds = {(one.backend, one.push, one.round): one.seconds for one in samples}
    result = []
    for backend, push, tokens in dict.fromkeys((one.backend, one.push, one.tokens) for one in samples):
        own = {number: took for (name, how, number), took in seconds.items() if (name, how) == (backend, push)}
        share = median(took / seconds[backend, "end", number] for number, took in own.items())
        result.append(TailFigure(backend, push, tokens, 1e3 * median(own.values()), share))
    return sorted(result, key=lambda one: (BACKENDS.index(one.backend), ("layer", "chunk", "end").index(one.push)))


def compute_figures(slices: Sequence[ComputeSlice]) -> list[ComputeFigure]:
    result = []
    for backend in dict.fromkeys(one.backend for one in slices):
        own = [one for one in slices if one.backend == backend]
        idle = median(one.without_engine / one.alone for one in own)
        busy = median(one.alone / one.beside_transfers for one in own)
        rate = median(one.transferred_per_second for one in own)
        paced = median(one.alone / one.beside_paced for one in own)
        result.append(ComputeFigure(backend, idle, busy, paced, rate))
    return result
