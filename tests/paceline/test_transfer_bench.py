"""The transfer bench measures what it says, on bytes that really arrived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import pytest

from paceline.cli import main
from paceline.transfer_bench.figures import compute_figures, figures, ratios, raw_method
from paceline.transfer_bench.measure import ComputeSlice, Sample, per_round
from paceline.transfer_bench.messages import Begin
from paceline.transfer_bench.pairs import REFERENCE, Missing, Pair, Stopped
from paceline.transfer_bench.plot import plot
from paceline.transfer_bench.pool import Pool, wrong_writes
from paceline.transfer_bench.run import Report
from paceline.transfer_bench.shape import Shape

TINY = Shape(layers=2, heads=8, dim=128, dtype_bytes=2, page_size=16, fragmented=False, tokens=64)


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.cli", "transfer-bench", *options]
    environment = {**os.environ, "PYTHONPATH": ".:proto"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.fixture
def pools() -> tuple[Pool, Pool]:
    source, destination = Pool.create("test-source", TINY.pool_bytes), Pool.create("test-target", TINY.pool_bytes)
    source.fill()
    return source, destination


@pytest.fixture
def reference(pools: tuple[Pool, Pool], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("PYTHONPATH", ".:proto")
    pair = Pair(REFERENCE, Begin(REFERENCE, TINY, "127.0.0.1", "none"), *pools)
    yield pair
    pair.close()


@pytest.mark.e2e
def test_a_small_run_gives_figures_that_follow_from_its_samples(tmp_path: Path) -> None:
    json, svg = tmp_path / "bench.json", tmp_path / "bench.svg"
    done = bench(
        "--layers", "2", "--tokens", "64", "--chunk", "32", "--rounds", "2", "--backends", "mooncake",
        "--json", str(json), "--plot", str(svg),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "everything arrives as it was sent" in done.stderr
    assert "64 positions: 0.5 MiB in 4 writes of 128 KiB" in done.stdout
    assert svg.read_text().startswith("<svg")

    report = msgspec.json.decode(json.read_bytes(), type=Report)
    assert report.environment.cpus >= 1 and report.environment.kernel and report.environment.packages
    ways = {(one.backend, one.method) for one in report.figures if one.tokens == 64}
    backend_ways = {("mooncake", way) for way in ("whole", "chunks", "engine", "window", "batch")}
    assert ways == backend_ways | {(REFERENCE, way) for way in ("memcpy", "shm", "tcp")}
    assert {one.tokens for one in report.figures} == {16, 64}, "one page is always measured"
    assert all(one.seconds > 0 and one.cpu_seconds >= 0 for one in report.samples)
    for figure in report.figures:
        rounds = per_round(report.samples, figure.backend, figure.method, figure.tokens)
        assert list(rounds) == [0, 1]
        assert figure.milliseconds == pytest.approx(1e3 * median(rounds.values()))
        nbytes = 2 * 2 * figure.tokens * 2048
        assert figure.bytes_per_second == pytest.approx(nbytes / figure.milliseconds * 1e3)
    assert {(one.method, one.tokens) for one in report.ratios} == {
        ("whole", 16), ("engine", 16), ("whole", 64), ("chunks", 64), ("engine", 64),
    }  # fmt: skip
    for ratio in report.ratios:
        ours = per_round(report.samples, "mooncake", ratio.method, ratio.tokens)
        tcp = per_round(report.samples, REFERENCE, "tcp", ratio.tokens)
        assert ratio.to_tcp == pytest.approx(median(tcp[number] / ours[number] for number in ours))
        assert min(ratio.to_raw, ratio.to_tcp, ratio.to_shm, ratio.to_memcpy) > 0
    assert [one.backend for one in report.idle_cpu] == ["mooncake"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--backends pigeon", "unknown transfer backend 'pigeon'; there are mooncake, nixl, stream, stream-tcp"),
        ("--tokens 0", "'0' is no number of at least 1"),
        ("--contiguous --fragmented", "not allowed with"),
        ("--page-size 100000", "impossible page"),
        ("--tokens 1000000", "over the bound"),
        ("--json /nowhere/at/all.json", "there is no folder /nowhere/at"),
    ],
)
def test_mistakes_are_explained(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["transfer-bench", *line.split()])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_both_layouts_move_every_byte_once() -> None:
    whole = TINY.writes(1 << 20, 1 << 30, 64)
    scattered = msgspec.structs.replace(TINY, fragmented=True)
    pages = scattered.writes(1 << 20, 1 << 30, 64)
    assert len(whole) == 2 * 2, "a buffer of a layer in one piece"
    assert len(pages) == 2 * 2 * 4, "no two pages merge"
    assert sum(write[2] for write in whole) == sum(write[2] for write in pages) == TINY.prompt_bytes(64)
    for count in range(1, 6):
        assert len(scattered.writes(1, 1, 16 * count if count < 5 else 63)) == 2 * 2 * min(count, 4)


def test_bytes_that_did_not_arrive_are_noticed(pools: tuple[Pool, Pool]) -> None:
    source, destination = pools
    destination.data[:] = source.data
    writes = TINY.writes(source.base, destination.base, 64)
    assert wrong_writes(source, destination, writes) == 0
    destination.data[5] ^= 1
    assert wrong_writes(source, destination, writes) == 1
    destination.poison()
    assert wrong_writes(source, destination, writes) == len(writes)


@pytest.mark.e2e
def test_a_process_that_dies_ends_the_measurement_with_its_name(reference: Pair) -> None:
    reference.aim()
    assert reference.direct("shm", 64)[0] > 0
    os.kill(reference.receiver.pid, signal.SIGKILL)
    with pytest.raises(Stopped, match=r"reference (copier|reader)"):
        reference.direct("tcp", 64)


@pytest.mark.e2e
def test_a_backend_that_is_not_there_is_missing_and_no_failure(
    pools: tuple[Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ".:proto")
    with pytest.raises(Missing, match="pigeon"):
        Pair("pigeon", Begin("pigeon", TINY, "127.0.0.1", "none"), *pools)


def sample(backend: str, method: str, number: int, *seconds: float) -> list[Sample]:
    return [Sample(backend, method, 64, number, one, 0.5) for one in seconds]


def test_ratios_are_medians_of_the_rounds_own_ratios() -> None:
    samples: list[Sample] = []
    for number, slow in enumerate((1.0, 10.0, 2.0)):  # the machine was busy in round 1: nobody's ratio suffers
        samples += sample("mooncake", "whole", number, 4 * slow, 4 * slow, 400.0)
        samples += sample("mooncake", "engine", number, 3 * slow)
        samples += sample("mooncake", "window", number, 2 * slow)
        samples += sample("mooncake", "batch", number, 3 * slow)
        for method, unit in (("memcpy", 0.25), ("shm", 0.5), ("tcp", 1.0)):
            samples += sample(REFERENCE, method, number, unit * slow)
    found = figures(samples, TINY)
    assert raw_method(found, "mooncake", 64) == "window"
    whole, engine = ratios(samples, found)
    assert (whole.to_raw, whole.to_tcp, whole.to_shm, whole.to_memcpy) == (0.5, 0.25, 0.125, 0.0625)
    assert engine.to_raw == pytest.approx(2 / 3)
    assert next(one for one in found if one.method == "whole").milliseconds == 8000
    assert "mooncake: sender path, whole prompt" in plot(found)


def test_without_a_library_the_engine_is_the_best_there_is() -> None:
    samples = [*sample("stream", "whole", 0, 2.0), *sample("stream", "engine", 0, 1.0)]
    assert raw_method(figures(samples, TINY), "stream", 64) == "engine"


def test_a_slowdown_is_the_median_of_the_paired_slices() -> None:
    slices = [ComputeSlice("nixl", n, 100 * s, 80 * s, 40 * s, 1e9, 64 * s) for n, s in enumerate((1.0, 0.1, 3.0))]
    (figure,) = compute_figures(slices)
    assert (figure.slowdown_by_idle_engine, figure.slowdown_by_transfers, figure.slowdown_by_paced) == (1.25, 2.0, 1.25)
