"""Ours, without prefill and decode instances: one stage of all layers, in the loop of `bench.undivided_engine`.

In: prompts. Out: their greedy continuations. Stage and sampler are the product's, and the loop has the defaults of its
schedulers: at most 64 requests and 512 prompt tokens in a batch, decodes beside prompts.
"""

from __future__ import annotations

from importlib.metadata import version

import torch

from bench.engines.adapter import Generate, serve
from bench.undivided_engine import Request, UndividedEngine
from engine.model_spec import read_spec
from engine.sampler import sample
from engine.stage import Stage

PAGES, PAGE_SIZE = 1024, 16  # what every case needs at once


def load(folder: str) -> tuple[str, Generate]:
    torch.set_num_threads(1)
    layers = range(read_spec(folder).layers)
    engine = UndividedEngine(Stage.load(folder, layers, PAGES, PAGE_SIZE, "float32"), sample)

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            engine.add(Request(number, tuple(prompt), new_tokens))
        while engine.busy:
            for token in engine.step():
                assert isinstance(token.key, int)
                answers[token.key].append(token.chosen.token)
        return answers

    return f"paceline {version('paceline')}", generate


if __name__ == "__main__":
    serve(load)
