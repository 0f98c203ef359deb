"""The shell of one rank: what `pipeline.io.driver` is in production, under virtual time.

In: entries, reports, acks, returns, batches that ran, messages of peers. Out: effects of the core carried
out exactly as the driver does: rank 0's observations go through its sequencer, everything else through
its core. Rank 0 gathers news for a moment and then writes entries until there is nothing to say.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from consensus.entry import BOOTSTRAP, FILL, RELEASE, SPILL, Entry, Return, TokenOut, Trailer
from pipeline.effects import (
    Acknowledge,
    CopyFromHost,
    CopyToHost,
    DropHostCopy,
    Effect,
    End,
    HostEffect,
    Relay,
    Reply,
    Report,
    Run,
    Skip,
)
from pipeline.local import Observation
from pipeline.planner import Batch
from pipeline.rank import RankCore
from pipeline.sequencer import Sequencer
from sim.case import MS
from sim.channel import Channel
from sim.clock import Violation
from sim.kv import NOBODY, KvPool
from sim.ports import ReceivingPort, SendingPort
from sim.process import Process
from sim.rules import watch_store

if TYPE_CHECKING:
    from pipeline.replica import Replica
    from sim.incarnation import Incarnation

_UNREAD = -1  # a token that nobody may look at


class RankProcess(Process):
    def __init__(self, incarnation: Incarnation, rank: int, replica: Replica) -> None:
        super().__init__(incarnation.world)
        self.incarnation, self.rank = incarnation, rank
        world, plan = self.world, incarnation.plan
        self.name = f"{incarnation.name}#{incarnation.epoch}.{rank}"
        self.core = RankCore(rank, plan.ranks, replica)
        self.sequencer = Sequencer(self.core, plan.ranks, incarnation.now()) if rank == 0 else None
        if self.sequencer is not None:
            watch_store(self.name, self.sequencer)
        topology = world.topology(incarnation.name)
        self.kv = KvPool(self.name, topology.shards[rank].layers, plan.pages, world.case.page_size)
        self._watch_allocations()
        self.port: SendingPort | ReceivingPort
        self.port = SendingPort(self, topology) if incarnation.is_prefill else ReceivingPort(self, topology)
        # Channels out of this rank; the incarnation connects them.
        self.relay: Channel | None = None
        self.back: Channel | None = None
        self.reports: Channel | None = None
        self.hidden: Channel | None = None
        self._events = Channel(world.clock, world.chance, world.chance.delays.loop, self._executor_event)
        # Copies to and from host memory, among themselves in order, beside the forwards.
        self._copies = Channel(world.clock, world.chance, world.chance.delays.copy, self._end_copy)
        self.inbound += [self._events, self._copies]
        self._queue: deque[Batch] = deque()
        self.host: dict[str, list[list[int]]] = {}  # room → saved KV
        self._host_used = 0
        self._hidden_tick = 0  # latest tick whose hidden states came from the rank before
        self._needless: set[int] = set()  # ticks that need not be run
        self._running: Batch | None = None
        self._waking = False
        self._timer = 0
        self._slow_until = self._lag = 0
        self._stutters_until = 0
        self._forward = plan.forward[min(rank, len(plan.forward) - 1)]

    @property
    def sending(self) -> SendingPort:
        assert isinstance(self.port, SendingPort)
        return self.port

    @property
    def receiving(self) -> ReceivingPort:
        assert isinstance(self.port, ReceivingPort)
        return self.port

    def die(self) -> None:
        """The process is gone. What its engine had on the way may still land for a while."""
        super().die()
        if isinstance(self.port, SendingPort):
            self.world.clock.after(self.world.case.tail, self.port.engine.bury)

    # -- being slow, being unreliable -------------------------------------------------------------------

    def slow_down(self, until: int, per_frame: int) -> None:
        """Only rank 0 reads from everybody."""
        self._slow_until, self._lag = until, per_frame
        for channel in self.inbound:
            channel.slow_down(until, per_frame)

    def stutter(self, until: int) -> None:
        self._stutters_until = until

    # -- what arrives --------------------------------------------------------------------------------

    def on_entry(self, item: tuple[Entry, Trailer]) -> None:
        if self.alive:
            effects = self.core.on_entry(*item)
            self.incarnation.after_apply(self)
            self.perform(effects)

    def on_back(self, item: Acknowledge | Return) -> None:
        if self.alive:
            assert self.sequencer is not None
            if isinstance(item, Acknowledge):
                self.sequencer.acknowledged(item.seq, item.ballots)
            else:
                self.sequencer.returned(item)
            self.wake()

    def on_report(self, item: Any) -> None:
        if self.alive:
            assert self.sequencer is not None
            self.sequencer.report(item)
            self.wake()

    def on_hidden(self, item: tuple[int, bool]) -> None:
        """A tick's hidden states, or word that the rank before skipped it."""
        self._hidden_tick, skipped = item
        if skipped:
            self._needless.add(self._hidden_tick)
        self._start_forward()

    def observe(self, observation: Observation) -> None:
        if not self.alive:
            return
        self.world.noticed(self, observation)
        self._observed(observation)
        if self._stutters_until > self.world.clock.now:
            good = observation.good or observation.topic == BOOTSTRAP
            again = Observation(observation.room, observation.topic, good, observation.reason, observation.payload,
                                observation.stage_seq)  # fmt: skip
            self.world.clock.after(self.world.chance.between((1, 5 * MS)), self._observed, again)

    def _observed(self, observation: Observation) -> None:
        if not self.alive or self.held(self._observed, observation):
            return
        if self.sequencer is not None:
            self.sequencer.observe(observation)
            self.wake()
        else:
            self.perform(self.core.observe(observation))

    # -- rank 0 writes -------------------------------------------------------------------------------

    def wake(self) -> None:
        if not self._waking:
            self._waking = True
            delay = self.world.chance.between(self.world.chance.delays.loop)
            if self._slow_until > self.world.clock.now:
                delay += self._lag
            self.world.clock.after(delay, self._advance)

    def _on_timer(self, due: int) -> None:
        if due == self._timer:
            self._timer = 0
            self._advance()

    def _advance(self) -> None:
        if self.held(self._advance):
            return
        self._waking = False
        sequencer, now = self.sequencer, self.incarnation.now()
        if not self.alive:
            return
        assert sequencer is not None
        while (effects := sequencer.next_entry(now, now)) is not None:
            self.incarnation.after_apply(self)
            self.perform(effects)
        if sequencer.window.full:
            return  # the next acknowledgement wakes it
        due = sequencer.wake_at()
        if due <= now:
            raise Violation(f"{self.name} has nothing to write, and yet would spin until {due} at {now}")
        if not self._timer or due < self._timer:
            self._timer = due
            self.world.clock.after(due - now, self._on_timer, due)

    # -- effects -------------------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Relay(entry, trailer):
                    assert self.relay is not None
                    self.relay.send((entry, trailer))
                case Acknowledge():
                    assert self.back is not None
                    self.back.send(effect)
                case Report(item):
                    assert self.reports is not None
                    self.reports.send(item)
                case Run(batch):
                    self._queue.append(batch)
                    self._start_forward()
                case Skip(tick):
                    if any(batch.tick == tick for batch in self._queue):
                        self._needless.add(tick)
                case CopyToHost() | CopyFromHost() | DropHostCopy():
                    self._copies.send(effect)
                case Reply(key, position, tokens):
                    self.incarnation.reply(key, position, tokens)
                case End(key, outcome):
                    self.incarnation.ended(key, outcome)
                case _:
                    self.port.perform(effect)

    # -- the executor --------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return len(self._queue) + (self._running is not None) + (not self._copies.empty)

    def _start_forward(self) -> None:
        if self._running is not None or not self._queue or not self.alive:
            return
        if self.rank and self._hidden_tick < self._queue[0].tick:
            return
        self._running = batch = self._queue.popleft()
        if batch.tick in self._needless:
            self.world.clock.after(1, self._pass_on, batch)
            return
        plan = self.incarnation.plan
        took = self._forward + batch.tokens * plan.per_token
        took += int(self.world.chance.draw() * took * plan.jitter)
        self.world.clock.after(took, self._end_forward, batch)

    def _end_copy(self, work: HostEffect) -> None:
        if not self.alive:
            return
        match work:
            case CopyToHost(room, stage_seq, pages):
                full = self._host_used + len(pages) > self.incarnation.plan.host_pages
                if not full:
                    self.host[room] = self.kv.save(pages)
                    self._host_used += len(pages)
                self._events.send(Observation(room, SPILL, not full, "host memory is full", b"", stage_seq))
            case CopyFromHost(room, stage_seq, pages):
                self.kv.load(pages, self._forget_copy(room))
                self._events.send(Observation(room, FILL, True, "", b"", stage_seq))
            case DropHostCopy(room):
                if room in self.host:
                    self._forget_copy(room)
                self._events.send(Observation(room, RELEASE, True))

    def _forget_copy(self, room: str) -> list[list[int]]:
        saved = self.host.pop(room)
        self._host_used -= len(saved[0]) // self.kv.page_size
        return saved

    def _end_forward(self, batch: Batch) -> None:
        if not self.alive or self.held(self._end_forward, batch):
            return
        for row in batch.rows:
            attempt = self.world.attempt(row.key)
            self.world.check_row(self, row)
            if self.core.replica.requests[row.key].ending is not None:
                # An earlier tick of it may have been skipped: what it reads here, and so what it writes, is nobody's.
                attempt = NOBODY
            else:
                self.kv.check(row.pages, row.start, attempt, f"{row.key.room} at tick {batch.tick}")
            self.kv.write(row.pages, row.start, len(row.tokens), attempt)
        self._ended(batch, skipped=False)

    def _pass_on(self, batch: Batch) -> None:
        """A skipped tick takes its turn without content."""
        if not self.alive or self.held(self._pass_on, batch):
            return
        self._needless.remove(batch.tick)
        side = "prefill" if isinstance(self.port, SendingPort) else "decode"
        self.world.coverage.cells[side, f"tick on rank {'0' if not self.rank else 'above 0'}", "skipped"] += 1
        self._ended(batch, skipped=True)

    def _ended(self, batch: Batch, skipped: bool) -> None:
        self._running = None
        if self.hidden is not None:
            self.hidden.send((batch.tick, skipped))
        self._events.send((batch, skipped))
        self._start_forward()

    def _executor_event(self, event: tuple[Batch, bool] | Observation) -> None:
        """What the loop hears from the executor: a copy ended, a batch ran, and on the last rank what was sampled."""
        if not self.alive:
            return
        if isinstance(event, Observation):
            self.observe(event)
            return
        batch, skipped = event
        if not skipped:
            self.port.ran(batch)
        if self.core.last:
            sampled = [row for row in batch.rows if row.sample is not None]
            right = (self.world.token(row.key, row.start + len(row.tokens)) for row in sampled)
            tokens = tuple(TokenOut(_UNREAD if skipped else token) for token in right)
            returned = Return(batch.tick, tokens)
            if self.sequencer is not None:
                self.on_back(returned)
            else:
                assert self.back is not None
                self.back.send(returned)

    # -- invariants ----------------------------------------------------------------------------------

    def _watch_allocations(self) -> None:
        pool = self.core.replica.leases.pool
        take, kv = pool.take, self.kv

        def checked(count: int) -> tuple[int, ...]:
            pages = take(count)
            kv.may_give(pages)
            return pages

        pool.take = checked  # type: ignore[method-assign]
