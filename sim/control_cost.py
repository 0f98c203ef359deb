"""`python -m sim.control_cost`: what a tick costs each rank in control, by running and by waiting requests.

In: counts of running and of waiting requests. Out: microseconds of CPU per tick and rank. The real core of a decode
instance, one object per rank, is joined into a ring without wires or delays: rank 0 writes entries, the others apply
them, tokens come back a pipeline later. Requests end and new ones come, so that a tick has its share of arrivals, votes
and pages; the number running and the number waiting stay as given. What the shell does besides (sockets, the executor)
is left out; encoding and decoding each entry, and the flight recording, is not. With `--copied` so much memory is
copied between ticks, as by a forward: what the core keeps is not in the nearer caches then, however little it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import msgspec

from consensus import recorder
from consensus.entry import PREALLOC, TRANSFER, Key, PeerRef, RequestSpec, Return, SamplingParams, TokenOut
from decode.scheduler import DecodeReplica
from pipeline.effects import (
    Acknowledge,
    Effect,
    End,
    OpenRoom,
    Relay,
    Report,
    Run,
    SendDestinations,
)
from pipeline.local import Observation
from pipeline.planner import Batch
from pipeline.rank import RankCore
from pipeline.replica import ReplicaConfig
from pipeline.sequencer import Sequencer

PROMPT, OUTPUT = 200, (64, 192)  # output tokens: between these, evenly
# So large that the growth which admission keeps room for is never exceeded: what a retract costs is another question.
PAGE = 256
IN_TRANSFER = 8  # at least as many more have pages and their KV on the way; the rest of the waiting ones have none
_FIRST_TOKEN = msgspec.msgpack.encode(TokenOut(1))
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Relay)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Cost:
    running: int  # as asked for
    waiting: int
    rows: float  # per tick
    at_work: int  # at the end
    median_us: list[float]  # of each rank
    mean_us: list[float]


@dataclass(slots=True)
class Ring:
    """`running` requests generate; `waiting` others hold no pages, or their KV is on the way."""

    ranks: int
    running: int
    waiting: int
    copied: bytes = b""  # between ticks
    spent: list[float] = field(default_factory=list)  # seconds of each rank since the last look
    flight: deque[Batch] = field(default_factory=deque)
    arrived: deque[str] = field(default_factory=deque)  # rooms whose KV may come, oldest first
    landed: dict[str, None] = field(default_factory=dict)  # rooms whose KV has come, until they end
    numbered: int = 0
    clock: int = 0
    cores: list[RankCore] = field(init=False)
    sequencer: Sequencer = field(init=False)

    def __post_init__(self) -> None:
        # Up to two pages for each, and as many free ones as admission keeps for growth.
        pages = 3 * (self.running + IN_TRANSFER)
        config = ReplicaConfig(
            epoch=1, pp_size=self.ranks, pages=pages, page_size=PAGE, chunk_size=512,
            max_batch_rows=max(64, self.running), async_depth=1, max_model_len=4096, eos_ids=(0,),
            stage_timeout=1 << 60, max_requests=2 * (self.running + self.waiting) + 64,
        )  # fmt: skip
        self.cores = [RankCore(rank, self.ranks, DecodeReplica(config)) for rank in range(self.ranks)]
        self.sequencer = Sequencer(self.cores[0], self.ranks, 0)
        self.spent = [0.0] * self.ranks
        for _ in range(self.running + self.waiting):
            self.submit()

    def submit(self) -> None:
        number = self.numbered = self.numbered + 1
        tokens = OUTPUT[0] + number * 37 % (OUTPUT[1] - OUTPUT[0])
        prompt = tuple(range(PROMPT))
        params = SamplingParams(tokens, ignore_eos=True)
        peer = PeerRef("prefill-0", "127.0.0.1:1", 1)
        self.sequencer.submit(RequestSpec(Key(f"request-{number:032}", 0), prompt, params, peer, 1 << 60))

    @property
    def at_work(self) -> int:
        """Those that run, and those of which the ring is being told that they can."""
        return len(self.landed)

    def settle(self) -> None:
        """Until as many run as should, and the tokens of some ticks have come."""
        while self.at_work < self.running:
            self.step()
        for _ in range(4 * self.running):
            self.step()

    def tick(self) -> None:
        """To the next launch."""
        bytearray(self.copied)
        slots = self.cores[0].replica.slots
        before = slots.next_tick
        while slots.next_tick == before:
            self.step()

    def step(self) -> None:
        """One entry, if rank 0 has one to write; else the oldest batch comes back."""
        self.clock += 1000
        while self.arrived and self.at_work < self.running:
            self.landed[self.arrived[0]] = None
            self.observe(Observation(self.arrived.popleft(), TRANSFER, True, payload=_FIRST_TOKEN))
        effects = self.timed(0, self.sequencer.next_entry, self.clock, self.clock)
        if effects is not None:
            self.perform(0, effects)
            for rank, core in enumerate(self.cores):
                self.timed(rank, _recorded, core)
        elif self.flight:
            batch = self.flight.popleft()
            self.timed(0, self.sequencer.returned, Return(batch.tick, tuple(TokenOut(7) for _ in batch.rows)))

    def perform(self, rank: int, effects: list[Effect]) -> None:
        last = rank == self.ranks - 1
        for effect in effects:
            match effect:
                case Relay():
                    wire = self.timed(rank, _ENCODER.encode, effect)
                    self.perform(rank + 1, self.timed(rank + 1, self._receive, rank + 1, wire))
                case Acknowledge(seq, ballots):
                    self.timed(0, self.sequencer.acknowledged, seq, ballots)
                case Report(item):
                    self.timed(0, self.sequencer.report, item)
                case Run(batch) if last:
                    self.flight.append(batch)
                case OpenRoom(key) if last:
                    self.observe(Observation(key.room, PREALLOC, True))
                case SendDestinations(room) if last:
                    self.arrived.append(room)
                case End(key) if rank == 0:
                    del self.landed[key.room]
                    self.submit()

    def observe(self, seen: Observation) -> None:
        """Every rank sees the same, rank 0 last."""
        for rank in range(self.ranks - 1, 0, -1):
            self.perform(rank, self.timed(rank, self.cores[rank].observe, seen))
        self.timed(0, self.sequencer.observe, seen)

    def timed(self, rank: int, work: Callable[..., _T], *arguments: Any) -> _T:
        began = time.thread_time()
        done = work(*arguments)
        self.spent[rank] += time.thread_time() - began
        return done

    def _receive(self, rank: int, wire: bytes) -> list[Effect]:
        relay = _DECODER.decode(wire)
        return self.cores[rank].on_entry(relay.entry, relay.trailer)


def _recorded(core: RankCore) -> None:
    """What the shell does for the flight file after each entry, short of writing it."""
    for record in core.recorder.fresh():
        recorder.frame(record)


def measure(ranks: int, running: int, waiting: int, ticks: int, copied: bytes = b"") -> Cost:
    ring = Ring(ranks, running, waiting, copied)
    ring.settle()
    each: list[list[float]] = []
    rows = []
    for _ in range(ticks):
        ring.spent = [0.0] * ranks
        ring.tick()
        each.append(ring.spent)
        rows.append(len(ring.flight[-1].rows))
    micros = [[1e6 * seconds for seconds in column] for column in zip(*each, strict=True)]
    replica = ring.cores[0].replica
    assert len({core.replica.digest.value for core in ring.cores}) == 1
    return Cost(
        running, len(replica.requests) - ring.at_work, statistics.fmean(rows), ring.at_work,
        [statistics.median(column) for column in micros], [statistics.fmean(column) for column in micros],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sim.control_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1000, 10000])
    parser.add_argument("--ticks", type=int, default=600)
    parser.add_argument("--copied", type=int, default=0, metavar="KIB", help="between ticks (default: 0)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measure(options.ranks, 16, 0, 100)  # the interpreter rewrites what runs often: the first point would pay for it
    copied = bytes(options.copied << 10)
    found = [measure(options.ranks, r, w, options.ticks, copied) for r in options.running for w in options.waiting]
    if options.json:
        print(json.dumps([asdict(cost) for cost in found]))
        return
    print(f"{'running':>8} {'waiting':>8} {'rows/tick':>10}   µs per tick, median (mean), of each rank")
    for cost in found:
        ranks = "  ".join(f"{m:7.1f} ({a:7.1f})" for m, a in zip(cost.median_us, cost.mean_us, strict=True))
        print(f"{cost.at_work:8} {cost.waiting:8} {cost.rows:10.1f}   {ranks}")


if __name__ == "__main__":
    main()
