"""Builds the layers of one stage from a checkpoint.

In: a spec, open weight files, the stage's layer range and its KV pool. Out: `StageWeights`.

Invariants: only tensors of these layers are read (plus the embedding on the first stage, and the
final norm and the head on the last); projections that share an input are fused here, so at no time
is there more than one layer in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.checkpoint import ModelSpec, Moe, WeightFiles
from engine.kv_pool import KVPool
from engine.layers import DecoderLayer, DenseMlp, RmsNorm, SelfAttention
from engine.linear import Linear
from engine.moe import SparseMlp

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class StageWeights:
    """What a stage computes with. `embedding` `[vocab, hidden]` on the first stage; `norm`, `head` on the last."""

    embedding: torch.Tensor | None
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm | None
    head: Linear | None


def load_stage_weights(
    files: WeightFiles,
    spec: ModelSpec,
    layers: range,
    pool: KVPool,
    progress: Progress | None = None,
    *,
    exact: bool,
) -> StageWeights:
    """Read and fuse the weights of `layers`, in the dtype of `pool`. `exact` as in `Linear`.

    `progress(fraction, what)` is called before each part and with 1.0 at the end.
    Raises `CheckpointError` naming a missing or misshapen tensor, and `NotInvariant`.
    """
    reader = _Reader(files, spec, pool.dtype, exact)
    first, last = layers.start == 0, layers.stop == spec.layers
    parts, done = len(layers) + first + last, 0

    def report(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done / parts, what)
        done += 1

    embedding, norm, head = None, None, None
    if first:
        report("embedding")
        embedding = reader.embedding()
    built = []
    for layer in layers:
        report(f"layer {layer}")
        built.append(reader.layer(layer, pool))
    if last:
        report("output head")
        norm = reader.norm("model.norm.weight", spec.hidden)
        if not spec.tied_embeddings:
            head = reader.linear([("lm_head", spec.vocab)], spec.hidden, bias=False)
        else:
            head = Linear(reader.embedding() if embedding is None else embedding, exact=exact)
    if progress is not None:
        progress(1.0, "loaded")
    return StageWeights(embedding, tuple(built), norm, head)


class _Reader:
    """Names and shapes of the tensors, by what they are for."""

    def __init__(self, files: WeightFiles, spec: ModelSpec, dtype: torch.dtype, exact: bool) -> None:
        self.files, self.spec, self.dtype, self.exact = files, spec, dtype, exact

    def embedding(self) -> torch.Tensor:
        return self.files.read("model.embed_tokens.weight", (self.spec.vocab, self.spec.hidden), self.dtype)

    def norm(self, name: str, size: int) -> RmsNorm:
        return RmsNorm(self.files.read(name, (size,), self.dtype), self.spec.rms_eps)

    def linear(self, parts: list[tuple[str, int]], inputs: int, *, bias: bool) -> Linear:
        """Projections (name, outputs) of the same input, fused to one."""
        weights = [self.files.read(f"{name}.weight", (outputs, inputs), self.dtype) for name, outputs in parts]
        biases = [self.files.read(f"{name}.bias", (outputs,), self.dtype) for name, outputs in parts] if bias else []
        return Linear(_join(weights), _join(biases) if biases else None, exact=self.exact)

    def layer(self, layer: int, pool: KVPool) -> DecoderLayer:
        prefix, spec = f"model.layers.{layer}", self.spec
        if spec.moe is not None and layer in spec.moe_layers:
            mlp: DenseMlp | SparseMlp = self._sparse_mlp(f"{prefix}.{spec.moe.prefix}", spec.moe)
        else:
            mlp = self._dense_mlp(f"{prefix}.mlp", spec.mlp, ("gate_proj", "up_proj", "down_proj"), spec.mlp_bias)
        return DecoderLayer(
            layer,
            self.norm(f"{prefix}.input_layernorm.weight", spec.hidden),
            self._attention(f"{prefix}.self_attn", layer, pool),
            self.norm(f"{prefix}.post_attention_layernorm.weight", spec.hidden),
            mlp,
        )

    def _attention(self, prefix: str, layer: int, pool: KVPool) -> SelfAttention:
        spec = self.spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        qkv = [(f"{prefix}.q_proj", queries), (f"{prefix}.k_proj", keys), (f"{prefix}.v_proj", keys)]
        return SelfAttention(
            qkv=self.linear(qkv, spec.hidden, bias=spec.qkv_bias),
            output=self.linear([(f"{prefix}.o_proj", spec.hidden)], queries, bias=spec.o_bias),
            query_norm=self.norm(f"{prefix}.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            key_norm=self.norm(f"{prefix}.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            window=spec.windows[layer],
            keys=pool.keys(layer).flatten(0, 1),
            values=pool.values(layer).flatten(0, 1),
        )

    def _dense_mlp(self, prefix: str, size: int, names: tuple[str, str, str], bias: bool) -> DenseMlp:
        gate, up, down = (f"{prefix}.{name}" for name in names)
        return DenseMlp(
            self.linear([(gate, size), (up, size)], self.spec.hidden, bias=bias),
            self.linear([(down, self.spec.hidden)], size, bias=bias),
        )

    def _sparse_mlp(self, prefix: str, moe: Moe) -> SparseMlp:
        return SparseMlp(
            router=self.linear([(f"{prefix}.gate", moe.experts)], self.spec.hidden, bias=False),
            experts=[
                self._dense_mlp(f"{prefix}.experts.{expert}", moe.mlp, moe.names, bias=False)
                for expert in range(moe.experts)
            ],
            per_token=moe.per_token,
            normalize=moe.normalize,
            float32_weights=moe.float32_weights,
        )


def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
