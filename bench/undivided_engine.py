"""The engine without disaggregation: one stage of all layers, prompts and answers computed in the same batches.

In: requests. Out of each `step`: the tokens that its forward gave. A step takes one token of each answer under way and,
beside them, up to `chunk_size` tokens of prompts, oldest first: continuous batching with chunked prefill. No input, no
output, no clock; whoever drives it decides when a step is made.

Invariants: a request holds the pages of its whole prompt and answer from its first chunk until it ends or is cancelled,
so nothing ever has to make room; first come, first served, and one that does not fit holds up those behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import Sample, Sampled
from engine.stage import Stage

Sampler = Callable[[torch.Tensor, Sequence[Sample]], Sequence[Sampled]]


@dataclass(frozen=True, slots=True)
class Params:
    """Satisfies `engine.batch.Sampling`; greedy unless said otherwise."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()
    logprobs: int = -1


@dataclass(frozen=True, slots=True)
class Request:
    """`stop_ids` end the answer, not before `min_tokens`; the last token counts as part of it."""

    key: Hashable
    prompt: tuple[int, ...]
    max_tokens: int
    params: Params = Params()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    key: Hashable
    position: int  # in the answer
    chosen: Sampled
    finish: str = ""  # stop, length: this token was the last


@dataclass(slots=True)
class _Running:
    request: Request
    pages: list[int]
    computed: int = 0  # positions whose KV is in the pool
    output: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Wish:
    """Satisfies `engine.batch.Sample`."""

    params: Params
    position: int
    forbidden: Sequence[int]
    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Row:
    """Satisfies `engine.batch.Row`."""

    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    sample: _Wish | None


class UndividedEngine:
    """`stage` has all layers of the model; its pool belongs to this object alone."""

    def __init__(self, stage: Stage, sampler: Sampler, chunk_size: int = 512, max_rows: int = 64) -> None:
        """Raises `ValueError` for a stage that is not the whole model."""
        if not (stage.first and stage.last):
            raise ValueError(f"layers {stage.layers.start}..{stage.layers.stop - 1} are not the whole model")
        self._stage, self._sampler = stage, sampler
        self._chunk_size, self._max_rows = chunk_size, max_rows
        self._page_size = stage.kv_pool.page_size
        self._free = list(range(stage.kv_pool.pages - 1, -1, -1))  # the lowest is taken first
        self._waiting: dict[Hashable, Request] = {}
        self._running: dict[Hashable, _Running] = {}  # in order of arrival

    @property
    def busy(self) -> bool:
        """A step would compute something."""
        return bool(self._waiting or self._running)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def add(self, request: Request) -> None:
        """Raises `ValueError` for one that can never run here, or whose key is in use."""
        if request.key in self._waiting or request.key in self._running:
            raise ValueError(f"a request {request.key!r} is here already")
        if not request.prompt or request.max_tokens < 1:
            raise ValueError("a request needs a prompt of at least one token and max_tokens of at least 1")
        need, pages = self._pages_for(request), self._stage.kv_pool.pages
        if need > pages:
            raise ValueError(f"prompt and max_tokens need {need} pages, the pool has {pages}")
        self._waiting[request.key] = request

    def cancel(self, key: Hashable) -> None:
        """Between two steps. No-op for one that is not here."""
        self._waiting.pop(key, None)
        if (running := self._running.pop(key, None)) is not None:
            self._free += reversed(running.pages)

    def step(self) -> list[Token]:
        """One forward; nothing if there is nothing to compute."""
        plan = self._plan()
        if not plan:
            return []
        rows = [self._row(running, count) for running, count in plan]
        logits = self._stage.forward(rows).logits
        assert logits is not None
        for running, count in plan:
            running.computed += count
        wanted = [(running, row.sample) for (running, _), row in zip(plan, rows, strict=True) if row.sample is not None]
        chosen = self._sampler(logits, [wish for _, wish in wanted])
        return [self._append(running, found) for (running, _), found in zip(wanted, chosen, strict=True)]

    def _plan(self) -> list[tuple[_Running, int]]:
        """Who takes part, with how many tokens: answers first, then prompts while the chunk has room."""
        plan = [(running, 1) for running in self._running.values() if running.output]
        budget = self._chunk_size
        for running in [running for running in self._running.values() if not running.output]:
            if budget == 0:
                return plan
            count = min(budget, len(running.request.prompt) - running.computed)
            plan.append((running, count))
            budget -= count
        while self._waiting and budget and len(self._running) < self._max_rows:
            request = next(iter(self._waiting.values()))
            need = self._pages_for(request)
            if need > len(self._free):
                return plan
            del self._waiting[request.key]
            running = _Running(request, [self._free.pop() for _ in range(need)])
            self._running[request.key] = running
            count = min(budget, len(request.prompt))
            plan.append((running, count))
            budget -= count
        return plan

    def _row(self, running: _Running, count: int) -> _Row:
        request, output, start = running.request, running.output, running.computed
        if output:
            tokens: Sequence[int] = (output[-1],)
        else:
            tokens = request.prompt[start : start + count]
        length = len(request.prompt) + len(output)
        if start + count < length:
            return _Row(start, tokens, running.pages, None)
        forbidden = request.stop_ids if len(output) < request.min_tokens else ()
        return _Row(start, tokens, running.pages, _Wish(request.params, length, forbidden, request.prompt, output))

    def _append(self, running: _Running, chosen: Sampled) -> Token:
        request, output = running.request, running.output
        output.append(chosen.token)
        stopped = chosen.token in request.stop_ids
        finish = "stop" if stopped else "length" if len(output) == request.max_tokens else ""
        if finish:
            self.cancel(request.key)
        return Token(request.key, len(output) - 1, chosen, finish)

    def _pages_for(self, request: Request) -> int:
        # The last token is never run, so its KV needs no place.
        return -(-(len(request.prompt) + request.max_tokens - 1) // self._page_size)
