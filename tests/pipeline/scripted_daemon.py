"""Not a test: an instance daemon whose model facts are made up: `... ROLE CONFIG.json`.

The model folder may hold `digest`, the model's digest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.io.daemon import ModelFacts, main


def facts(model: str, layers: str, ranks: int) -> ModelFacts:
    ranges = tuple((2 * rank, 2 * rank + 2) for rank in range(ranks))
    digest = Path(model) / "digest"
    return ModelFacts(
        digest=digest.read_text() if digest.exists() else "d1", num_layers=2 * ranks, kv_heads=2, head_dim=8, vocab_size=1000, eos_ids=(0,),
        max_positions=4096, layer_ranges=ranges, windows=(0,) * (2 * ranks),
    )  # fmt: skip


if __name__ == "__main__":
    role = sys.argv.pop(1)
    sys.exit(main(role, "tests.pipeline.scripted_rank", facts))
