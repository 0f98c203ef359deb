"""Not a test: an instance daemon whose model facts are made up: `... ROLE CONFIG.json`."""

from __future__ import annotations

import sys

from pipeline.io.daemon import DaemonConfig, ModelFacts, main


def facts(config: DaemonConfig) -> ModelFacts:
    ranges = tuple((2 * rank, 2 * rank + 2) for rank in range(config.pp_size))
    return ModelFacts(
        digest="d1", num_layers=2 * config.pp_size, kv_heads=2, head_dim=8, vocab_size=1000, eos_ids=(0,),
        max_positions=4096, layer_ranges=ranges,
    )  # fmt: skip


if __name__ == "__main__":
    role = sys.argv.pop(1)
    sys.exit(main(role, "tests.pipeline.scripted_rank", facts))
