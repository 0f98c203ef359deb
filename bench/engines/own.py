"""Ours, without prefill and decode instances: one stage of all layers, and the smallest loop that serves many requests.

In: prompts. Out: their greedy continuations. The stage, the sampler, the pages and the rows are the product's; the loop
stands in for its schedulers with their defaults: a batch holds at most `ROWS` requests and `CHUNK` prompt tokens, first
come, first served, decodes beside prompts; a request has all its pages from its first chunk on, or waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

from bench.engines.adapter import Generate, serve
from consensus.entry import Key, SamplingParams
from engine.model_spec import read_spec
from engine.sampler import sample
from engine.stage import Stage
from pipeline.pages import PagePool
from pipeline.planner import Row, SampleSpec

PAGE_SIZE, CHUNK, ROWS = 16, 512, 64
POSITIONS = 16384  # of the pool: what every case needs at once, and as much as the others are given


@dataclass(slots=True)
class Request:
    key: Key
    prompt: tuple[int, ...]
    wanted: int
    pages: tuple[int, ...] = ()
    computed: int = 0  # positions whose KV is in the pool
    output: list[int] = field(default_factory=list)

    def row(self, budget: int) -> Row:
        """The next positions: its last token, or as much of the prompt as fits into `budget`."""
        start = self.computed
        if self.output:
            tokens: tuple[int, ...] = (self.output[-1],)
        else:
            tokens = self.prompt[start : start + budget]
        self.computed += len(tokens)
        known = len(self.prompt) + len(self.output)
        if self.computed < known:
            return Row(self.key, start, tokens, self.pages, None)
        params = SamplingParams(self.wanted, ignore_eos=True)
        return Row(self.key, start, tokens, self.pages, SampleSpec(params, known, (), self.prompt, tuple(self.output)))


class Loop:
    def __init__(self, stage: Stage, chunk: int = CHUNK, rows: int = ROWS) -> None:
        self._stage, self._chunk, self._rows = stage, chunk, rows
        self._pool = PagePool(stage.kv_pool.pages)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        requests = [Request(Key(str(number), 0), tuple(prompt), new_tokens) for number, prompt in enumerate(prompts)]
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            batch = self._plan(waiting, running)
            self._step(batch)
            for request in running:
                if len(request.output) == request.wanted:
                    self._pool.give(request.pages)
            running = [request for request in running if len(request.output) < request.wanted]
        return [request.output for request in requests]

    def _plan(self, waiting: deque[Request], running: list[Request]) -> list[tuple[Request, Row]]:
        """Moves those that begin now from `waiting` to `running`."""
        batch, budget = [], self._chunk
        for request in running:
            row = request.row(budget) if request.output or budget else None
            if row is not None:
                batch.append((request, row))
                budget -= 0 if request.output else len(row.tokens)
        while waiting and budget and len(running) < self._rows:
            request = waiting[0]
            # The last token is told, its KV is never needed.
            pages = -(-(len(request.prompt) + request.wanted - 1) // PAGE_SIZE)
            if pages > self._pool.free:
                if not running:
                    raise ValueError(f"{pages} pages are needed, the pool has {self._pool.size}")
                break
            request.pages = self._pool.take(pages)
            running.append(waiting.popleft())
            batch.append((request, request.row(budget)))
            budget -= len(batch[-1][1].tokens)
        return batch

    def _step(self, batch: Sequence[tuple[Request, Row]]) -> None:
        logits = self._stage.forward([row for _, row in batch]).logits
        assert logits is not None
        asked = [(request, row.sample) for request, row in batch if row.sample is not None]
        for (request, _), chosen in zip(asked, sample(logits, [wish for _, wish in asked]), strict=True):
            request.output.append(chosen.token)


def load(folder: str) -> tuple[str, Generate]:
    torch.set_num_threads(1)
    layers = range(read_spec(folder).layers)
    loop = Loop(Stage.load(folder, layers, POSITIONS // PAGE_SIZE, PAGE_SIZE, "float32"))
    return f"paceline {version('paceline')}", loop.generate


if __name__ == "__main__":
    serve(load)
