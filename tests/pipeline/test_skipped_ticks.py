"""Executors of two ranks and the hidden states between them: a tick that nobody wants is passed on, not computed."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import zmq

from consensus.entry import Key, Return, SamplingParams, TokenOut
from pipeline.io.executor import Event, Executor, Ran, Sampled
from pipeline.io.hidden import HiddenReceiver, HiddenSender
from pipeline.io.zap import make_keys
from pipeline.planner import Batch, Row, SampleSpec

SAMPLE = SampleSpec(SamplingParams(max_tokens=1), 3, (), (1, 2, 3), ())


@dataclass
class Model:
    """Counts, and holds its first forward until it is let go."""

    on_layer_written: Any = None
    ran: list[int] = field(default_factory=list)  # start of each row it computed
    hold: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def forward(self, rows: Sequence[Any], hidden: torch.Tensor | None = None) -> Any:
        self.begun.set()
        assert self.hold.wait(20)
        self.ran += [row.start for row in rows]
        width = torch.ones((sum(len(row.tokens) for row in rows), 4))
        assert hidden is None or hidden.shape == width.shape
        return type("Output", (), {"hidden": width, "logits": width})


def batch(tick: int, sample: SampleSpec | None = None) -> Batch:
    return Batch(tick, tick % 3, (Row(Key("r", 0), 3 * tick, (1, 2, 3), (0,), sample),))


def events(executor: Executor, count: int) -> list[Event]:
    found: list[Event] = []
    while len(found) < count:
        assert select.select([executor.fd], [], [], 20)[0], found
        found += executor.events()
    return found


@pytest.fixture
def ranks() -> Iterator[tuple[Executor, Model, Executor, Model]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = make_keys(2)
    receiver = HiddenReceiver(context, "inproc://h", 1, keys[1], writer=0, most_tokens=64)
    sender = HiddenSender(context, "inproc://h", 1, keys[0], reader=1)
    models = Model(), Model()

    def sampler(logits: torch.Tensor, samples: Sequence[Any]) -> list[TokenOut]:
        return [TokenOut(7)] * len(samples)

    first = Executor(models[0], sampler, None, sender, None, 20.0, False)  # type: ignore[arg-type]  # it copies nothing
    last = Executor(models[1], sampler, receiver, None, None, 20.0, False)  # type: ignore[arg-type]
    for executor in (first, last):
        executor.start()
    yield first, models[0], last, models[1]
    for model in models:
        model.hold.set()
    for executor in (first, last):
        executor.stop(20)
    context.destroy(linger=0)


def test_a_tick_skipped_by_the_first_rank_costs_no_rank_anything_and_keeps_its_turn(
    ranks: tuple[Executor, Model, Executor, Model],
) -> None:
    first, model, last, other = ranks
    other.hold.set()
    for executor in (first, last):
        for work in (batch(1), batch(2), batch(3, SAMPLE), batch(4, SAMPLE)):
            executor.run(work)
    assert model.begun.wait(20)
    # Given a tick that runs and three behind it, when all but the last are not wanted any more,
    for tick in (1, 2, 3):
        first.skip(tick)
    model.hold.set()
    # then the one that had begun is computed, those behind it on no rank, and all come back in order.
    assert [event.batch.tick for event in events(first, 2) if isinstance(event, Ran)] == [1, 4]
    assert events(last, 6) == [
        Ran(batch(1), 0, 0, 0),
        Sampled(Return(1, ())),
        Sampled(Return(2, ())),
        Sampled(Return(3, (TokenOut(0),))),
        Ran(batch(4, SAMPLE), 0, 0, 0),
        Sampled(Return(4, (TokenOut(7),))),
    ]
    assert (model.ran, other.ran) == ([3, 12], [3, 12])
    assert (first.skipped, last.skipped) == (2, 2)


def test_a_rank_may_skip_what_the_one_before_has_computed(ranks: tuple[Executor, Model, Executor, Model]) -> None:
    first, model, last, other = ranks
    model.hold.set()
    for executor in (first, last):
        executor.run(batch(1))
        executor.run(batch(2, SAMPLE))
    assert other.begun.wait(20)
    last.skip(2)
    other.hold.set()
    assert events(last, 3)[-1] == Sampled(Return(2, (TokenOut(0),)))
    assert (model.ran, other.ran) == ([3, 6], [3])
    # What is remembered is bounded: ticks that are over are forgotten.
    for tick in (1, 2):
        last.skip(tick)
    assert last.events() == []
