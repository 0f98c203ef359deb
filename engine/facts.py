"""What an instance's daemon must know of a model folder, without torch.

In: the folder, and how its layers are to be split over ranks. Out: `Facts`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint import model_digest, parse_split, read_spec, split_layers


@dataclass(frozen=True, slots=True)
class Facts:
    """`layer_ranges`: global layer ids [begin, end) by rank; `windows`: per layer, 0 if a token sees all before it."""

    digest: str
    num_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_positions: int
    layer_ranges: tuple[tuple[int, int], ...]
    windows: tuple[int, ...]


def read_facts(folder: str, layers: str, ranks: int, with_head: bool = True) -> Facts:
    """`layers` is an explicit split ("8,7,8,7") or empty: balanced by cost over `ranks`.

    `with_head`: in that cost, every token goes through the output head.

    Raises `ValueError` or `OSError` for a folder or a split that cannot work.
    """
    spec = read_spec(folder)
    return Facts(
        digest=model_digest(folder),
        num_layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab,
        eos_ids=spec.eos_ids,
        max_positions=spec.max_positions,
        layer_ranges=tuple(parse_split(layers, spec.layers) if layers else split_layers(spec, ranks, with_head)),
        windows=tuple(window or 0 for window in spec.windows),
    )
