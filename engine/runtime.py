"""The runtime as a rank process needs it: how many pages fit, load the stage, sample.

One object per rank; it binds the folder, the layers and the dtype, so that the process that drives it
needs to know nothing of checkpoints.
"""

from __future__ import annotations

from pathlib import Path

from engine.kv_pool import pages_that_fit
from engine.model_spec import read_spec
from engine.sampler import sample
from engine.stage import DTYPES, Stage
from engine.stage_weights import Progress


class Runtime:
    """`layers` of the model in `folder`. `batch_invariant` as in `Stage.load`."""

    sample = staticmethod(sample)

    def __init__(self, folder: str, layers: range, page_size: int, dtype: str, batch_invariant: bool) -> None:
        self.spec = read_spec(Path(folder))
        self.layers = layers
        self._folder, self._page_size, self._dtype, self._batch_invariant = folder, page_size, dtype, batch_invariant

    def capacity(self, budget: int) -> int:
        """KV pages of these layers that fit into `budget` bytes."""
        spec = self.spec
        dtype = DTYPES[self._dtype]
        return pages_that_fit(budget, len(self.layers), self._page_size, spec.kv_heads, spec.head_dim, dtype)

    def load(self, pages: int, progress: Progress, shared: bool = False) -> Stage:
        """Reads the weights and allocates the pool, in `shared` memory or not; `progress(fraction, what)`."""
        return Stage.load(
            self._folder, self.layers, pages, self._page_size, self._dtype, progress, shared, self._batch_invariant
        )
