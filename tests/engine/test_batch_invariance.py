"""A request's logits are the same bits, whatever runs beside it and wherever its parts run.

Every run below serves the same requests: a prefill instance reads prompts in chunks and hands their KV over to a
decode instance, which takes turns with requests whose KV it moves out to host memory and back. What differs is how
many run together, the size of chunks, the splits into stages, and whether prefill and decode are one instance.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.checkpoint import read_spec
from engine.layer_split import split_layers
from engine.smollm2 import ensure_default_model
from engine.stage import Stage
from tests.engine.driver import PlainRow, Wish, run_stages
from tests.engine.tiny_models import VOCAB, Reference

PAGE, PAGES = 16, 48
LENGTHS = (37, 5, 70, 1, 20, 33, 16, 64)
NEW = 6


@dataclass
class Request:
    """`text` grows by the token of the highest logit; `seen` holds one row of logits for each."""

    who: int
    text: list[int]
    done: int = 0  # positions whose KV is in the pool
    pages: list[int] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)  # KV in host memory, by region

    @property
    def finished(self) -> bool:
        return len(self.seen) == NEW


class Instance:
    """Stages of one model, and which of their pages are free."""

    def __init__(self, folder: Path, split: Sequence[tuple[int, int]], dtype: str, seed: int) -> None:
        self.stages = [
            Stage.load(folder, range(*part), PAGES, PAGE, dtype=dtype, batch_invariant=True) for part in split
        ]
        self.regions = {
            (region.layer, region.kind): region for stage in self.stages for region in stage.kv_pool.regions()
        }
        self.free = list(range(PAGES))
        random.Random(seed).shuffle(self.free)

    def take(self, request: Request) -> None:
        request.pages = [self.free.pop() for _ in range(-(-(len(request.text) + NEW) // PAGE))]

    def give_back(self, request: Request) -> None:
        self.free = request.pages + self.free
        request.pages = []

    def run(self, requests: Sequence[Request], chunk: int) -> None:
        rows = []
        for request in requests:
            tokens = request.text[request.done : request.done + chunk]
            request.done += len(tokens)
            wish = Wish() if request.done == len(request.text) else None
            rows.append(PlainRow(request.done - len(tokens), tokens, request.pages, wish))
        logits = iter(run_stages(self.stages, rows))
        for request, row in zip(requests, rows, strict=True):
            if row.sample is not None:
                request.seen.append(next(logits).clone())
                request.text.append(int(request.seen[-1].argmax()))

    def copy_out(self, request: Request) -> dict[tuple[int, str], list[bytes]]:
        size = {key: PAGE * region.bytes_per_token for key, region in self.regions.items()}
        return {
            key: [ctypes.string_at(region.address + page * size[key], size[key]) for page in request.pages]
            for key, region in self.regions.items()
        }

    def copy_in(self, request: Request, contents: dict[tuple[int, str], list[bytes]]) -> None:
        for key, region in self.regions.items():
            for page, content in zip(request.pages, contents[key], strict=True):
                ctypes.memmove(region.address + page * len(content), content, len(content))


def move(request: Request, source: Instance, target: Instance) -> None:
    contents = source.copy_out(request)
    source.give_back(request)
    target.free.reverse()  # to other pages than before
    request.pages = [target.free.pop() for _ in next(iter(contents.values()))]
    target.copy_in(request, contents)


def logits_of(
    prefill: Instance, decode: Instance, prompts: Sequence[Sequence[int]], chunk: int, together: int, retract: bool
) -> list[torch.Tensor]:
    """`[NEW, vocab]` for each prompt."""
    requests = [Request(who, list(prompt)) for who, prompt in enumerate(prompts)]
    waiting, tick = list(requests), 0
    reading: list[Request] = []
    running: list[Request] = []
    while not all(request.finished for request in requests):
        while waiting and len(reading) + len(running) < together:
            reading.append(waiting.pop(0))
            prefill.take(reading[-1])
        if prefill is decode:
            if batch := [*running, *reading]:
                prefill.run(batch, chunk)
        else:
            if running:
                decode.run(running, chunk)
            if reading:
                prefill.run(reading, chunk)
        for request in [request for request in reading if request.seen]:
            reading.remove(request)
            running.append(request)
            if prefill is not decode:
                move(request, prefill, decode)
        for request in [request for request in running if request.finished]:
            running.remove(request)
            decode.give_back(request)
        tick += 1
        if retract and running and tick % 2:
            move(running[0], decode, decode)
            running.append(running.pop(0))
    return [torch.stack(request.seen) for request in requests]


def assert_the_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], how: str) -> None:
    for who, (own, alone) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(own, alone), f"request {who}, {how}: {int((own != alone).sum())} logits differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-biases-linear", "mistral-window", "qwen3", "qwen3-moe", "mixtral"])
def test_logits_are_the_same_bits_however_requests_are_served(
    tiny: Callable[[str], Reference], name: str, dtype: str
) -> None:
    folder = tiny(name).folder
    ids = random.Random(4)
    prompts = [[ids.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    whole = Instance(folder, [(0, 4)], dtype, 1)
    alone = logits_of(whole, whole, prompts, 1000, 1, False)
    two = Instance(folder, [(0, 1), (1, 4)], dtype, 2)
    three = Instance(folder, [(0, 2), (2, 3), (3, 4)], dtype, 3)
    for prefill, decode, chunk, together, retract in (
        (whole, whole, 1, 8, False),
        (whole, whole, 17, 3, True),
        (two, two, 32, 8, True),
        (two, three, 1000, 8, False),
        (three, two, 16, 5, True),
        (two, whole, 7, 2, True),
    ):
        found = logits_of(prefill, decode, prompts, chunk, together, retract)
        how = f"PP{len(prefill.stages)} to PP{len(decode.stages)}, chunks of {chunk}, {together} together"
        assert_the_same_bits(found, alone, how)


def test_the_default_model_keeps_its_bits_too() -> None:
    folder = ensure_default_model()
    ids = random.Random(9)
    prompts = [[ids.randrange(1000, 40000) for _ in range(length)] for length in LENGTHS[:5]]
    spec = read_spec(folder)
    whole = Instance(folder, [(0, spec.layers)], "float32", 1)
    alone = logits_of(whole, whole, prompts, 1000, 1, False)
    two = Instance(folder, split_layers(spec, 2), "float32", 2)
    found = logits_of(two, whole, prompts, 17, 4, True)
    assert_the_same_bits(found, alone, "PP2 to PP1, chunks of 17, 4 together")
