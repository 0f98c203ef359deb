"""`paceline transfer-bench`. In: the command's options. Out: a table; JSON and a plot if asked for; an exit code.

1: a process broke, or no backend could be used. 2: options that make no sense. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import msgspec

from transfer.plan import PlanError

from .figures import ComputeFigure, Figure, Ratios, TailFigure, compute_figures, figures, ratios, tail_figures
from .measure import ComputeSlice, IdleCpu, Sample, Tail, compute, idle_cpu, rounds, tails
from .messages import Begin
from .options import MOST_BYTES
from .pairs import REFERENCE, Missing, Pair, Stopped
from .plot import plot
from .pool import Pool
from .shape import Shape
from .table import render

PACKAGES = ("mooncake-transfer-engine-non-cuda", "nixl", "torch", "numpy", "pyzmq", "paceline")


class Environment(msgspec.Struct, frozen=True):
    cpus: int  # that this command may use
    machine: str
    kernel: str
    python: str
    load: tuple[float, float, float]
    packages: dict[str, str]


class Report(msgspec.Struct, frozen=True):
    """The JSON file."""

    environment: Environment
    shape: Shape
    chunk: int
    host: str
    checksum: str
    skipped: dict[str, str]
    figures: list[Figure]
    ratios: list[Ratios]
    idle_cpu: list[IdleCpu]
    compute: list[ComputeFigure]
    compute_slices: list[ComputeSlice]
    tails: list[TailFigure]
    tail_samples: list[Tail]
    samples: list[Sample]


def run(options: argparse.Namespace) -> int:
    tokens = sorted({options.page_size, *options.tokens})  # one page: the latency
    shape = Shape(
        options.layers,
        options.heads,
        options.dim,
        options.dtype_bytes,
        options.page_size,
        options.fragmented,
        tokens[-1],
    )
    if problem := _problem(shape, options.json, options.plot):
        print(f"paceline transfer-bench: {problem}", file=sys.stderr)
        return 2
    try:
        report = measure(options, shape, tokens)
    except Stopped as error:
        print(f"paceline transfer-bench: {error}", file=sys.stderr)
        return 1
    print(render(shape, report.figures, report.ratios, report.idle_cpu, report.compute, report.tails))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if options.plot:
        options.plot.write_text(plot(report.figures))
    return 0


def measure(options: argparse.Namespace, shape: Shape, tokens: Sequence[int]) -> Report:
    """Raises `Stopped`."""
    source, destination = Pool.create("bench-source", shape.pool_bytes), Pool.create("bench-target", shape.pool_bytes)
    source.fill()
    environment, skipped, pairs = _environment(), dict[str, str](), list[Pair]()
    with ExitStack() as stack:
        for name in (REFERENCE, *options.backends):
            begin = Begin(name, shape, options.host, options.checksum)
            _say(f"starting {name}")
            try:
                pair = Pair(name, begin, source, destination, options.peer_host, options.peer_netns)
            except Missing as reason:
                skipped[name] = str(reason)
                _say(f"skipping {name}: {reason}")
                continue
            pairs.append(pair)
            stack.callback(pair.close)
        reference, *backends = pairs
        if not backends:
            raise Stopped("none of the backends can be used here")
        idle = idle_cpu(pairs)
        slices: list[ComputeSlice] = []
        if options.compute:
            slices = list(compute(reference, backends, shape, tokens[-1], options.chunk, options.rounds, _say))
        left: list[Tail] = []
        if options.overlap:
            left = list(tails(backends, tokens[-1], options.chunk, options.overlap / 1e3, options.rounds, _say))
        for pair in pairs:
            pair.aim()
        samples = list(rounds(pairs, shape, tokens, options.chunk, options.rounds, _say))
    found = figures(samples, shape)
    return Report(
        environment, shape, options.chunk, options.host, options.checksum, skipped, found, ratios(samples, found), idle,
        compute_figures(slices), slices, tail_figures(left), left, samples,
    )  # fmt: skip


def _problem(shape: Shape, *files: Path | None) -> str | None:
    try:
        shape.topology()
    except PlanError as error:
        return str(error)
    if shape.pool_bytes > MOST_BYTES:
        return f"a pool of {shape.pool_bytes} bytes is over the bound of {MOST_BYTES}; take fewer --tokens"
    for path in files:
        if path is not None and not path.parent.is_dir():
            return f"there is no folder {path.parent} for {path.name}"
    return None


def _environment() -> Environment:
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "not installed"
    cpus, machine = len(os.sched_getaffinity(0)), platform.machine()
    return Environment(cpus, machine, platform.release(), platform.python_version(), os.getloadavg(), packages)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
