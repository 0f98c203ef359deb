"""How the executor speaks of KV that is written: at once where a layer is worth a push, in groups where it is not."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from consensus.entry import Key
from pipeline.io.executor import Event, Executor, Ran, Wrote
from pipeline.planner import Batch, Row

LAYERS = range(10, 19)


class Model:
    """Writes the KV of one layer after the other."""

    on_layer_written: Callable[[int], None] | None = None

    def forward(self, rows: Sequence[Any], hidden: torch.Tensor | None = None) -> Any:
        for layer in LAYERS:
            if self.on_layer_written is not None:
                self.on_layer_written(layer)
        return type("Output", (), {"hidden": None, "logits": torch.empty(0)})


def batch(tick: int, *tokens: int) -> Batch:
    return Batch(tick, 0, tuple(Row(Key(f"r{count}", 0), 0, (1,) * count, (), None) for count in tokens))


def events(work: Sequence[Batch], by_layer: bool = True) -> list[Event]:
    model = Model()
    executor = Executor(model, lambda logits, samples: (), None, None, None, 20.0, by_layer)  # type: ignore[arg-type]  # it copies nothing
    executor.start()
    found: list[Event] = []
    for each in work:
        executor.run(each)
    while sum(isinstance(event, Ran) for event in found) < len(work):
        assert select.select([executor.fd], [], [], 20)[0], found
        found += executor.events()
    executor.stop(20)
    return found


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ((512,), [(layer, layer + 1) for layer in LAYERS]),
        ((2000,), [(layer, layer + 1) for layer in LAYERS]),
        ((128,), [(10, 14), (14, 18)]),  # the last one is left to `Ran`, which speaks of all
        ((100, 28), [(10, 14), (14, 18)]),
        ((300,), [(10, 12), (12, 14), (14, 16), (16, 18)]),
        ((40,), []),
    ],
)
def test_layers_are_told_in_order_and_in_groups_of_512_positions(
    tokens: tuple[int, ...], told: list[tuple[int, int]]
) -> None:
    work = batch(1, *tokens)
    assert [e.layers for e in events([work]) if isinstance(e, Wrote)] == told


def test_what_one_batch_left_untold_does_not_run_into_the_next() -> None:
    found = events([batch(1, 128), batch(2, 128)])
    assert [(e.batch.tick, e.layers) for e in found if isinstance(e, Wrote)] == [
        (1, (10, 14)), (1, (14, 18)), (2, (10, 14)), (2, (14, 18))
    ]  # fmt: skip
    assert [e.batch.tick for e in found if isinstance(e, Ran)] == [1, 2]


def test_pushing_whole_chunks_nothing_is_said_of_layers() -> None:
    assert not [e for e in events([batch(1, 512)], by_layer=False) if isinstance(e, Wrote)]
