"""The executor thread of a rank: runs batches on the model, in order, and says what came of them.

In: batches from the control loop (at most one per slot). Out: events, announced on an eventfd that the
loop polls. The two threads share no lock: a queue each way. If the thread dies, its last event says why.
A tick that is skipped, here or by the rank before, still takes its turn: it is passed on without content, so
that hidden states and returns stay in step, and no KV is said to be written.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from consensus.entry import FILL, RELEASE, SPILL, Return, TokenOut
from pipeline.effects import CopyFromHost, CopyToHost, DropHostCopy, HostEffect
from pipeline.io.hidden import HiddenReceiver, HiddenSender
from pipeline.io.host_memory import HostMemory
from pipeline.local import Observation
from pipeline.planner import Batch


class Model(Protocol):
    """`engine.stage.Stage`, handed in: `pipeline` and `engine` do not import each other."""

    on_layer_written: Callable[[int], None] | None

    def forward(self, rows: Sequence[Any], hidden: torch.Tensor | None = None) -> Any: ...


# Positions times layers. Telling the loop of each layer of a short prompt would cost it as much as one of a long chunk,
# and the forward waits for the interpreter meanwhile.
TOLD_AT_LEAST = 512

Sampler = Callable[[torch.Tensor, Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Wrote:
    """KV of the batch is in this rank's pool for some layers more."""

    batch: Batch
    layers: tuple[int, int]  # global, half-open


@dataclass(frozen=True, slots=True)
class Ran:
    """KV of the batch is in this rank's pool. The times are µs of the monotonic clock: it was taken from the queue,
    the hidden states it needs were there, it was computed (on the last rank: and sampled)."""

    batch: Batch
    began: int = field(compare=False)
    fed: int = field(compare=False)
    ended: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampler's result; last rank only."""

    item: Return


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy to or from host memory ended."""

    seen: Observation


@dataclass(frozen=True, slots=True)
class Died:
    """The thread is gone; the rank must follow."""

    reason: str


Event = Wrote | Ran | Sampled | Copied | Died


class Executor:
    """Owns the thread. `hidden_in` is None on rank 0, `hidden_out` on the last rank."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        hidden_in: HiddenReceiver | None,
        hidden_out: HiddenSender | None,
        host: HostMemory,
        timeout: float,
        by_layer: bool,
    ) -> None:
        """`by_layer`: say of each layer, or of a few of a small batch, when its KV is written."""
        self._model, self._sampler, self.host = model, sampler, host
        self._in, self._out, self._timeout = hidden_in, hidden_out, timeout
        self._work: queue.SimpleQueue[Batch | HostEffect | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if by_layer:
            model.on_layer_written = self._wrote
        self._needless: frozenset[int] = frozenset()
        self._done = 0  # last tick that was run or skipped
        self.skipped = 0  # ticks; read by the loop for status only
        self._running: tuple[Batch, float] | None = None  # read by the loop for status only
        self._untold = 0, 0  # tick, and its first layer that the loop was not told of: `Ran` speaks of what is left
        self._thread = threading.Thread(target=self._main, name="executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        self._work.put(None)
        self._thread.join(timeout)

    def run(self, work: Batch | HostEffect) -> None:
        """Queues work; it is done in the order of the log."""
        self._work.put(work)

    def skip(self, tick: int) -> None:
        """The tick need not be computed any more, unless it has begun."""
        # Replaced as a whole, and only here: the thread reads it.
        self._needless = frozenset({tick, *(other for other in self._needless if other > self._done)})

    def queued(self) -> int:
        return self._work.qsize()

    def events(self) -> list[Event]:
        """What happened since the last call; clears the eventfd."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        found: list[Event] = []
        while not self._events.empty():
            found.append(self._events.get_nowait())
        return found

    def running(self) -> tuple[int, int, float]:
        """(tick, rows, seconds so far); zeros while there is nothing to do."""
        running = self._running
        if running is None:
            return 0, 0, 0.0
        batch, since = running
        return batch.tick, len(batch.rows), time.monotonic() - since

    def executing(self) -> str:
        """For people: what runs and for how long, or empty."""
        tick, rows, seconds = self.running()
        return f"tick {tick} ({rows} rows) for {seconds:.1f} s" if tick else ""

    def _main(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                if isinstance(work, Batch):
                    self._running = work, time.monotonic()
                    self._execute(work)
                    self._running, self._done = None, work.tick
                else:
                    self._copy(work)
        except BaseException as error:  # whatever it is, the rank must not go on without its executor
            self._tell(Died(f"executor at {self.executing() or 'start'}: {type(error).__name__}: {error}"))

    def _execute(self, batch: Batch) -> None:
        began = now_us()
        hidden = self._in.receive(batch.tick, batch.tokens, self._timeout) if self._in else None
        fed = now_us()
        if batch.tick in self._needless or (hidden is not None and not hidden.numel()):
            self._pass_on(batch)
            return
        output = self._model.forward(batch.rows, hidden)
        if self._out is not None:
            ended = now_us()
            self._out.send(batch.tick, output.hidden, self._timeout)
            self._tell(Ran(batch, began, fed, ended))
            return
        samples = [row.sample for row in batch.rows if row.sample is not None]
        chosen = self._sampler(output.logits, samples) if samples else ()
        self._tell(Ran(batch, began, fed, now_us()))
        self._tell(Sampled(Return(batch.tick, tuple(TokenOut(c.token, c.logprob, c.top) for c in chosen))))

    def _pass_on(self, batch: Batch) -> None:
        """The tick goes on as hidden states of no width, and comes back with tokens that nobody reads."""
        self.skipped += 1
        if self._out is not None:
            self._out.send(batch.tick, torch.empty((batch.tokens, 0)), self._timeout)
            return
        unread = tuple(TokenOut(0) for row in batch.rows if row.sample is not None)
        self._tell(Sampled(Return(batch.tick, unread)))

    def _wrote(self, layer: int) -> None:
        assert self._running is not None
        batch = self._running[0]
        if batch.tick != self._untold[0]:
            self._untold = batch.tick, layer
        begin = self._untold[1]
        if batch.tokens * (layer + 1 - begin) >= TOLD_AT_LEAST:
            self._tell(Wrote(batch, (begin, layer + 1)))
            self._untold = batch.tick, layer + 1

    def _copy(self, work: HostEffect) -> None:
        try:
            match work:
                case CopyToHost(room, stage_seq, pages):
                    self.host.save(room, pages)
                    self._tell(Copied(Observation(room, SPILL, True, stage_seq=stage_seq)))
                case CopyFromHost(room, stage_seq, pages):
                    self.host.load(room, pages)
                    self._tell(Copied(Observation(room, FILL, True, stage_seq=stage_seq)))
                case DropHostCopy(room):
                    self.host.drop(room)
                    # Work is done in order: whatever copy of the room came before has ended here.
                    self._tell(Copied(Observation(room, RELEASE, True)))
        except (MemoryError, KeyError, RuntimeError) as error:
            assert not isinstance(work, DropHostCopy)
            topic = SPILL if isinstance(work, CopyToHost) else FILL
            self._tell(Copied(Observation(work.room, topic, False, str(error), stage_seq=work.stage_seq)))

    def _tell(self, event: Event) -> None:
        self._events.put(event)
        os.eventfd_write(self.fd, 1)


def now_us() -> int:
    return time.monotonic_ns() // 1000
