"""One incarnation of an instance: its ranks, its ring, and the little of its daemon that the core relies on.

The daemon's part: a key is submitted once, a cancel of a key that is not open goes no further, and each
outcome is passed on once. Invariants checked here: equal digests by seq, conserved pages, one outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from consensus.entry import Key, RequestSpec, TokenOut
from decode.scheduler import DecodeReplica
from pipeline.outcome import ERROR, Outcome
from pipeline.replica import ReplicaConfig
from prefill.scheduler import PrefillReplica
from sim.case import HURRY, InstancePlan
from sim.channel import Channel
from sim.clock import Violation
from sim.model import EOS
from sim.rank import RankProcess
from sim.rules import OneVerdict, inspect

if TYPE_CHECKING:
    from sim.world import World


class Incarnation:
    def __init__(self, world: World, name: str, epoch: int, plan: InstancePlan, is_prefill: bool) -> None:
        self.world, self.name, self.epoch, self.plan, self.is_prefill = world, name, epoch, plan, is_prefill
        self.alive = True
        self.digests: list[bytes] = []  # by seq - 1
        self.draining = False
        self.known: dict[Key, bool] = {}  # True while open
        self._let_go: dict[Key, None] = {}  # still open, and nobody reads what is said of it
        self.watchers: list[Callable[[RankProcess], None]] = []  # after each applied entry
        config = ReplicaConfig(
            epoch=epoch,
            pp_size=plan.ranks,
            pages=plan.pages,
            page_size=world.case.page_size,
            chunk_size=plan.chunk,
            max_batch_rows=plan.rows,
            async_depth=plan.async_depth,
            max_model_len=world.case.max_len,
            eos_ids=(EOS,),
            stage_timeout=plan.stage_timeout,
            max_requests=1000,
        )
        self._skew = int(world.chance.draw() * world.case.skew) if world.case.skew else 0
        kind = PrefillReplica if is_prefill else DecodeReplica
        self.ranks = [RankProcess(self, rank, kind(config)) for rank in range(plan.ranks)]
        self.verdicts = OneVerdict(name)
        world.coverage.watch(self.ranks[0].core.replica, "prefill" if is_prefill else "decode", self.verdicts.look)
        self.channels = self._connect() if plan.ranks > 1 else []
        world.clock.after(0, self.ranks[0].wake)

    def now(self) -> int:
        """By its own clock, which runs like all others and shows something else."""
        return self.world.clock.now + self._skew

    def _connect(self) -> list[Channel]:
        world, capacity, bounds = self.world, self.world.case.capacity, self.world.chance.delays.ring
        first, last = self.ranks[0], self.ranks[-1]
        made: list[Channel] = []

        def channel(reader: RankProcess, receive: Callable[..., object], room: int | None = capacity) -> Channel:
            made.append(Channel(world.clock, world.chance, bounds, receive, room))
            reader.inbound.append(made[-1])
            return made[-1]

        for before, after in zip(self.ranks, self.ranks[1:], strict=False):
            before.relay = channel(after, after.on_entry)
            before.hidden = channel(after, after.on_hidden, None)
            after.reports = channel(first, first.on_report)
        last.back = channel(first, first.on_back)
        return made

    # -- from and to the gateway -------------------------------------------------------------------

    def submit(self, spec: RequestSpec) -> None:
        if self.ranks[0].held(self.submit, spec):
            return
        sequencer = self.ranks[0].sequencer
        assert sequencer is not None
        if self.known.setdefault(spec.key, True):
            sequencer.submit(spec)
            self.ranks[0].wake()

    def cancel(self, key: Key, reason: str) -> None:
        if self.ranks[0].held(self.cancel, key, reason):
            return
        sequencer = self.ranks[0].sequencer
        assert sequencer is not None
        if self.known.get(key):
            sequencer.cancel(key, reason)
            self.ranks[0].wake()

    @property
    def has_open(self) -> bool:
        return any(self.known.values())

    def let_go(self) -> None:
        """The instance leaves: whoever waits here is sent elsewhere, and the log ends the attempts."""
        for key in [key for key, is_open in self.known.items() if is_open and key not in self._let_go]:
            self.world.gateway_hears(self, key, Outcome(ERROR, f"{self.name} is stopping", 0, retryable=True))
            self._let_go[key] = None
            self.cancel(key, f"{self.name} is stopping")

    def inspect(self) -> None:
        """What the status and dump commands read of every rank. They must change nothing, and the dump replays."""
        for process in self.ranks:
            if process.alive and not process.frozen:
                inspect(process)

    def reply(self, key: Key, position: int, tokens: tuple[TokenOut, ...]) -> None:
        if not self.known.get(key):
            raise Violation(f"{self.name}: tokens of {key.room} after its outcome")
        if key in self._let_go:
            return
        self.world.gateway_hears(self, key, (position, tokens))

    def ended(self, key: Key, outcome: Outcome) -> None:
        if not self.known.get(key):
            raise Violation(f"{self.name}: a second outcome of {key.room}: {outcome}")
        self.known[key] = False
        state, timed_out, _ = outcome.reason.partition(" for more than ")
        if timed_out and state in self.ranks[0].core.replica.transitions and self.plan.stage_timeout >= HURRY:
            raise Violation(f"{self.name}: {key.room} was {outcome.reason}: only a deadline ended it")
        if key in self._let_go:
            return
        self.world.gateway_hears(self, key, outcome)

    # -- after every entry ---------------------------------------------------------------------------

    def after_apply(self, process: RankProcess) -> None:
        replica, seq = process.core.replica, process.core.cursor.applied
        digest = replica.digest.value
        if seq > len(self.digests):
            assert seq == len(self.digests) + 1
            self.digests.append(digest)
            self.world.trace(self, seq, digest)
        elif self.digests[seq - 1] != digest:
            raise Violation(f"{process.name} decided differently at seq {seq}")
        try:
            replica.audit()
        except AssertionError as error:
            raise Violation(f"{process.name} at seq {seq}: {error}") from error
        self._check_victims(process)
        for watcher in self.watchers:
            watcher(process)

    @staticmethod
    def _check_victims(process: RankProcess) -> None:
        """The oldest that generates never makes room: without that nothing promises that anybody finishes."""
        replica, seq = process.core.replica, process.core.cursor.applied
        for victim in replica.states.get("spilling", {}).values():
            if victim.stage_seq != seq:
                continue
            others = [r.number for state in ("ready", "running") for r in replica.states[state].values()]
            if not others or victim.number < min(others):
                raise Violation(f"{process.name} at seq {seq}: {victim.key.room} makes room, and nobody older needs it")

    # -- the end -------------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        process = self.ranks[rank]
        if process.alive:
            process.die()

    def leftovers(self) -> list[str]:
        """What should not be there once every request has ended (invariant 4)."""
        found: list[str] = []
        for process in self.ranks:
            core, replica = process.core, process.core.replica
            counts = replica.leases.count()
            parts: dict[str, object] = {
                "requests": list(replica.requests),
                "rooms": list(replica.rooms),
                "observations": len(core.local),
                "store": len(core.store),
                "pages not free": replica.config.pages - counts["free"],
                "ticks in flight": replica.slots.in_flight,
                "executor": process.queued,
                "attempts": list(replica.attempts),
                "moved": replica.moved,
                "host copies": list(process.host),
            }
            if self.is_prefill:
                side = process.sending.side
                parts |= {"sending rooms": side.rooms(), "handles": process.sending.engine.in_flight}
                parts |= {"in flight": side.in_flight(), "unproven": side.unproven(), "parked": len(side._parked)}
            else:
                parts["receiving rooms"] = process.receiving.side.rooms()
            if process.sequencer is not None:
                parts |= process.sequencer.queues()
            found += [f"{process.name}: {what} {value}" for what, value in parts.items() if value]
        return found

    def check_outboxes(self) -> None:
        """What waits on the ring, to be sent or to be read, is bounded by rank 0's window."""
        sequencer = self.ranks[0].sequencer
        assert sequencer is not None
        for process in self.ranks:
            waited = process.relay.most_waiting if process.relay is not None else 0
            if waited > sequencer.window.limit:
                raise Violation(f"{process.name}: {waited} entries waited, the window is {sequencer.window.limit}")
        unread = back.most_unread if (back := self.ranks[-1].back) is not None else 0
        if unread > sequencer.window.limit + sequencer.core.replica.slots.count:
            raise Violation(f"{self.name}: {unread} acknowledgements and ticks waited for rank 0")
