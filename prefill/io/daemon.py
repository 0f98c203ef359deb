"""The prefill instance's process: `python -m prefill.io.daemon [CONFIG.json]`.

In: a `DaemonConfig` as JSON, from the file or standard input. Out: an exit code. Everything but the
role and the reading of the model folder is in `pipeline.io.daemon`, which must not know the engine.
"""

from __future__ import annotations

import sys

from engine.checkpoint import model_digest, parse_split, read_spec, split_layers
from pipeline.io.daemon import DaemonConfig, ModelFacts, main


def read_facts(config: DaemonConfig) -> ModelFacts:
    """Raises `ValueError` or `OSError` for a folder or a layer split that cannot work."""
    spec = read_spec(config.model)
    split = parse_split(config.layers, spec.layers) if config.layers else split_layers(spec, config.pp_size)
    return ModelFacts(
        digest=model_digest(config.model),
        num_layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab,
        eos_ids=spec.eos_ids,
        max_positions=spec.max_positions,
        layer_ranges=tuple(split),
    )


if __name__ == "__main__":
    sys.exit(main("prefill", "prefill.io.rank_process", read_facts))
