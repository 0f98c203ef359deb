"""Requests and rows as a planner would make them, and a driver of stages without one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.sampler import sample
from engine.stage import Stage


@dataclass(frozen=True)
class Params:
    """A request's sampling parameters, with every filter off and temperature 0 unless said otherwise."""

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


@dataclass(frozen=True)
class Wish:
    """A `Sample`."""

    params: Params = Params()
    position: int = 0
    forbidden: Sequence[int] = ()
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()


@dataclass(frozen=True)
class PlainRow:
    """A `Row`."""

    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    sample: Wish | None = None


def load_split(folder: Path, split: Sequence[tuple[int, int]], pages: int, page_size: int) -> list[Stage]:
    return [Stage.load(folder, range(*part), pages, page_size) for part in split]


def run_stages(stages: Sequence[Stage], rows: Sequence[PlainRow]) -> torch.Tensor:
    """One tick through the pipeline; the last stage's logits."""
    hidden = None
    for stage in stages[:-1]:
        hidden = stage.forward(rows, hidden).hidden
    logits = stages[-1].forward(rows, hidden).logits
    assert logits is not None
    return logits


def generate(stages: Sequence[Stage], prompts: list[list[int]], new_tokens: int, chunk: int) -> list[list[int]]:
    """Greedy continuations, as a planner would make them.

    A request joins the batch at every tick, so chunks of some prompts run beside the decodes of
    others; prompts are read `chunk` tokens at a time; pages are handed out in a scattered order.
    """
    page_size = stages[0].kv_pool.page_size
    free = list(range(stages[0].kv_pool.pages))
    random.Random(3).shuffle(free)
    texts = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)  # positions whose KV is in the pool
    needed = [-(-(len(prompt) + new_tokens) // page_size) for prompt in prompts]
    pages = [[free.pop() for _ in range(count)] for count in needed]
    tick = 0
    while any(len(text) < len(prompt) + new_tokens for text, prompt in zip(texts, prompts, strict=True)):
        rows, owners = [], []
        for who in range(min(tick + 1, len(prompts))):
            text = texts[who]
            if len(text) == len(prompts[who]) + new_tokens:
                continue
            tokens = text[done[who] : done[who] + chunk]
            complete = done[who] + len(tokens) == len(text)
            wish = Wish(position=len(text)) if complete else None
            rows.append(PlainRow(done[who], tokens, pages[who], wish))
            owners.append(who)
            done[who] += len(tokens)
        logits = run_stages(stages, rows)
        wishes = [row.sample for row in rows if row.sample is not None]
        askers = [who for who, row in zip(owners, rows, strict=True) if row.sample is not None]
        for who, chosen in zip(askers, sample(logits, wishes), strict=True):
            texts[who].append(chosen.token)
        tick += 1
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
