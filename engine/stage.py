"""A stage: consecutive layers of one model on one rank of a pipeline.

In: the rows of a packed batch, with hidden states `[T, hidden]` from the previous stage unless this
is the first one. Out: hidden states for the next stage or, on the last one, logits of the rows that
want a token.

Invariants: the split into stages changes no bits (hidden states travel in the model dtype); KV of
every token of the batch is in the pool when `forward` returns, and layer by layer as
`on_layer_written` says; a stage keeps nothing else between batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from engine.attention import PackedBatch
from engine.batch import Row
from engine.checkpoint import ModelSpec, WeightFiles, read_spec
from engine.kv_pool import KVPool
from engine.rope import cosines_and_sines, inverse_frequencies
from engine.stage_weights import Progress, StageWeights, load_stage_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Exactly one of the two: `hidden` `[T, hidden]`, or `logits` `[rows with a sample, vocab]`, in row order.

    Both are in the model dtype.
    """

    hidden: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Stage:
    """Layers `layers` (global ids) of `spec`, over `kv_pool`."""

    def __init__(self, spec: ModelSpec, layers: range, kv_pool: KVPool, weights: StageWeights) -> None:
        """Raises `ValueError` if pool and weights are not for these layers."""
        if kv_pool.layers != layers or [layer.layer for layer in weights.layers] != list(layers):
            raise ValueError(f"the pool or the weights are not those of layers {layers.start}..{layers.stop - 1}")
        self.spec, self.layers, self.kv_pool = spec, layers, kv_pool
        self.first, self.last = layers.start == 0, layers.stop == spec.layers
        self.on_layer_written: Callable[[int], None] | None = None
        self._weights = weights
        self._frequencies = inverse_frequencies(spec.rope, spec.head_dim)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        layers: range,
        pages: int,
        page_size: int,
        dtype: str = "float32",
        on_progress: Progress | None = None,
        shared: bool = False,
        batch_invariant: bool = False,
    ) -> Stage:
        """A stage with the weights of `layers` in `folder` and a fresh pool of `pages` pages.

        `on_progress(fraction, what)` is called as the load goes on, and with 1.0 at its end.
        `shared`: other processes of this host can map the pool. `batch_invariant`: a row's bits depend on nothing
        else in its batch; in float32 they never do.
        Raises `UnsupportedModel`, `CheckpointError`, `NotInvariant`, or `ValueError` for a bad range or dtype.
        """
        spec = read_spec(folder)
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= spec.layers:
            raise ValueError(f"layers {layers.start}..{layers.stop - 1} are not a range of this model's {spec.layers}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        pool = KVPool(layers, pages, page_size, spec.kv_heads, spec.head_dim, DTYPES[dtype], shared)
        exact = batch_invariant or dtype == "float32"
        weights = load_stage_weights(WeightFiles(folder), spec, layers, pool, on_progress, exact=exact)
        return cls(spec, layers, pool, weights)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], hidden: torch.Tensor | None = None) -> StageOutput:
        """Run one packed batch of T tokens. `hidden` `[T, hidden]` unless this is the first stage.

        Calls `on_layer_written(layer)` (global id) as soon as the KV of the whole batch is in the
        pool of `layer`, before that layer attends. Raises `ValueError` for rows that do not fit the
        pool or hidden states that do not fit the rows.
        """
        batch = PackedBatch(rows, self.kv_pool.page_size, self.kv_pool.pages)
        hidden = self._enter(batch, hidden)
        rotation = cosines_and_sines(
            batch.positions, self._frequencies, self.spec.rope.attention_factor, self.kv_pool.dtype
        )
        for layer in self._weights.layers:
            notify = self.on_layer_written
            last = layer.layer == self.spec.layers - 1
            hidden = layer(hidden, batch, rotation, partial(notify, layer.layer) if notify else None, last)
        if not self.last:
            return StageOutput(hidden=hidden)
        assert self._weights.norm is not None
        assert self._weights.head is not None
        if not len(hidden):
            return StageOutput(logits=hidden.new_empty(0, self.spec.vocab))
        return StageOutput(logits=self._weights.head(self._weights.norm(hidden)))

    def _enter(self, batch: PackedBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        if self._weights.embedding is not None:
            if hidden is not None:
                raise ValueError("the first stage takes tokens, not hidden states")
            return functional.embedding(batch.token_ids(), self._weights.embedding)
        shape = (batch.tokens, self.spec.hidden)
        if hidden is None or tuple(hidden.shape) != shape or hidden.dtype != self.kv_pool.dtype:
            found = "nothing" if hidden is None else f"{list(hidden.shape)} {hidden.dtype}"
            raise ValueError(f"hidden states must be {list(shape)} {self.kv_pool.dtype}, got {found}")
        return hidden
