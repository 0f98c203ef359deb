"""The transfer engine of one prefill rank, as unkind as the real libraries.

In: `Submit` actions. Out: per handle one completion, or two when the first only said that its fate is
unknown. A handle is one to three pieces that land each at its own time, and each copies what its source
pages hold *at that moment*. A handle may fail without having started, fail and land all the same, or
stall. What a dead process had on the way lands for as long as the bounded tail. What flies to a dead
process is lost, and its handle is of unknown fate: after a while the engine is replaced, its healthy
handles get a moment to end, and what a destroyed engine had on the way may still land, with the content
of that moment, until the tail has passed.
Under leases a failed handle is called quiet, because its connection is closed, and what had left before still
flies; the target lets nothing land but what it has granted, and nothing once it has revoked.
What arrives at a process that stands still waits in its kernel and lands when it goes on, also long after the
writer's tail; a sender that stands still may have given its kernel everything, or nothing yet.
While two instances are cut off from one another, nothing lands; a handle that waits too long for that is
reported as failed before it lands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.case import CORRUPT, FAIL_LATE, FAIL_QUIET, LOSE, STALL
from sim.clock import Violation
from sim.kv import KvPool
from transfer.actions import Peer, SenderAction, Submit
from transfer.extents import Extent
from transfer.sender import SendingSide

if TYPE_CHECKING:
    from sim.rank import RankProcess

PATIENCE = 1_000_000  # after which a handle that waits for a cut link is called failed
SUSPICION = 1_000_000  # of unknown fate for so long: the engine is replaced
SETTLE = 100_000  # from the first word of a peer that stood still to the fence
DRAIN = 500_000  # that the healthy handles of a retired engine get to end


@dataclass(slots=True)
class Flight:
    submit: Submit
    source: RankProcess
    target: RankProcess
    pieces: int
    touched: tuple[list[int], list[int]]  # pages read, pages written
    engine: int
    reported: bool = False  # called failed; what is left may still land
    lost: bool = False
    damaged: bool = False  # one position is to land wrong
    in_kernel: int = 0  # pieces that a target which stands still has not read yet
    only_kernel: bool = False  # nothing but those can land any more
    frozen: KvPool | None = None  # what a destroyed engine had read of the source


class SimEngine:
    def __init__(self, owner: RankProcess, side: SendingSide, apply: Callable[[Sequence[SenderAction]], None]) -> None:
        self.owner = owner
        self._side, self._apply = side, apply
        self._number = 1  # of the engine in use, as the side counts
        self._suspects: dict[int, int] = {}  # handle of unknown fate → its engine
        self._orders: list[tuple[str, int]] = []  # faults to come: (kind, length), one per handle
        self._flights: dict[int, Flight] = {}
        self.writing: dict[tuple[Peer, str], int] = {}  # (target, room) → handles that may still land

    def order(self, kind: str, count: int, length: int) -> None:
        """The next `count` handles suffer this."""
        self._orders += [(kind, length)] * count

    def pardon(self) -> None:
        """What was ordered and has not struck yet never will."""
        self._orders.clear()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def bury(self) -> None:
        """The owner is dead and its tail has passed: nothing of it lands any more."""
        for flight in list(self._flights.values()):
            self._drained(flight)

    def submit(self, submit: Submit, target: RankProcess | None) -> None:
        world, owner = self.owner.world, self.owner
        world.check_fence(owner, submit)
        fault, length = self._orders.pop(0) if self._orders else ("", 0)
        refused = target is None or not target.alive or submit.room not in target.receiving.granted
        if world.case.leased and refused:
            self._later(submit.handle, "there is no such lease", True)
            return
        if target is None or fault == FAIL_QUIET:
            world.count_fault(fault)
            self._later(submit.handle, "the write did not start", True)
            return
        runs = list(submit.runs)
        groups = self._split(runs)
        touched = (
            owner.kv.pages_of((src, count) for src, _, count in runs),
            target.kv.pages_of((dst, count) for _, dst, count in runs),
        )
        flight = Flight(submit, owner, target, len(groups), touched, self._number)
        self._flights[submit.handle] = flight
        self._count(flight, 1)
        self._read(flight, 1)
        if fault:
            world.count_fault(fault)
        flight.damaged = fault == CORRUPT
        if fault == FAIL_LATE:
            self._fail(flight, "reported failed, but still on its way")
        chance = world.chance
        if fault == LOSE:
            self._fail(flight, "failed, and its fate is unknown")
            groups = groups[1:] if chance.draw() < 0.5 else groups  # and even so some of it lands, much later
            length = 3 * world.case.tail
        for group in groups:
            delay = chance.between(chance.delays.engine)
            if fault in (STALL, FAIL_LATE, LOSE):
                delay += int(chance.draw() * length)
            world.clock.after(delay, self._land, flight, group)

    def refused(self, target: RankProcess, room: str | None) -> None:
        """The target lets nothing of this room land any more; None: nothing at all, it is dead."""
        for flight in list(self._flights.values()):
            if flight.target is target and room in (None, flight.submit.room):
                self._over(flight)
                if not flight.reported:
                    self._later(flight.submit.handle, "the lease is over", True)

    # -- inside ------------------------------------------------------------------------------------

    def _fail(self, flight: Flight, reason: str) -> None:
        """Report it, although it may still land. Under leases its connection is closed: our pages are read no more."""
        flight.reported = True
        leased = self.owner.world.case.leased
        if leased and flight.frozen is None:
            flight.frozen = flight.source.kv.copy()
            self._read(flight, -1)
        self._later(flight.submit.handle, reason, leased)

    def _split(self, runs: list[Extent]) -> list[list[Extent]]:
        chance = self.owner.world.chance
        if not runs or chance.draw() < 0.6:
            return [runs]
        src, dst, count = runs[0]
        if len(runs) > 1:
            cut = 1 + int(chance.draw() * (len(runs) - 1))
            return [runs[:cut], runs[cut:]]
        if count == 1:
            return [runs]
        cut = 1 + int(chance.draw() * (count - 1))
        return [[(src, dst, cut)], [(src + cut, dst + cut, count - cut)]]

    def _count(self, flight: Flight, by: int) -> None:
        """The flight may land from now on (1), or not any more (-1)."""
        for page in flight.touched[1]:
            flight.target.kv.inbound[page] += by
        flow = (flight.submit.peer, flight.submit.room)
        self.writing[flow] = self.writing.get(flow, 0) + by
        if not self.writing[flow]:
            del self.writing[flow]

    def _read(self, flight: Flight, by: int) -> None:
        for page in flight.touched[0]:
            flight.source.kv.outbound[page] += by

    def _over(self, flight: Flight) -> None:
        """Nothing of it lands any more."""
        del self._flights[flight.submit.handle]
        self._count(flight, -1)
        if flight.frozen is None:
            self._read(flight, -1)

    def _drained(self, flight: Flight) -> None:
        """The tail has passed: nothing lands any more, except what the target's own kernel holds."""
        flight.pieces, flight.only_kernel = flight.in_kernel, True
        if not flight.pieces:
            self._over(flight)

    def _later(self, handle: int, error: str | None, quiet: bool) -> None:
        world = self.owner.world
        world.clock.after(world.chance.between(world.chance.delays.ring), self._tell, handle, error, quiet)

    def _tell(self, handle: int, error: str | None, quiet: bool) -> None:
        if not self.owner.alive or self.owner.held(self._tell, handle, error, quiet):
            return
        if error is None or quiet:
            self._suspects.pop(handle, None)
        elif handle not in self._suspects:
            self._suspects[handle] = self._number
            self.owner.world.clock.after(SUSPICION, self._look_at, handle)
        self._apply(self._side.completed(handle, error, quiet))

    def _done(self, submit: Submit) -> None:
        if self.owner.alive:
            self._suspects.pop(submit.handle, None)
            checksums = self.owner.kv.checksums(submit.layers, submit.spans)
            self._apply(self._side.completed(submit.handle, None, checksums=checksums))

    def _land(self, flight: Flight, runs: list[Extent], from_kernel: bool = False) -> None:
        world, source, target = self.owner.world, flight.source, flight.target
        if flight.submit.handle not in self._flights:
            return  # buried, or its engine's tail has passed
        if flight.only_kernel and not from_kernel:
            return
        if source.frozen and not from_kernel and world.chance.draw() < 0.5 and source.held(self._land, flight, runs):
            return
        flight.in_kernel -= from_kernel
        if target.in_kernel(self._land, flight, runs, True):
            flight.in_kernel += 1
            return
        if not target.alive:
            flight.lost = True
        else:
            until = world.cut_until(source.incarnation.name, target.incarnation.name)
            if until > world.clock.now and not from_kernel:
                self._wait_for_link(flight, runs, until)
                return
            granted = target.receiving.granted[flight.submit.room] if world.case.leased else flight.touched[1]
            if any(page not in granted for page in flight.touched[1]):
                raise Violation(f"{source.name} writes to pages of {target.name} that {flight.submit.room} has not")
            target.kv.land(flight.frozen or source.kv, flight.submit.layers, runs)
            if flight.damaged and runs:
                flight.damaged = False
                target.kv.damage(flight.submit.layers[0], runs[0][1])
        flight.pieces -= 1
        if flight.pieces:
            return
        self._over(flight)
        if not source.alive or flight.frozen is not None:
            return
        if not flight.lost:
            world.clock.after(world.chance.between(world.chance.delays.ring), self._done, flight.submit)
        elif not flight.reported:
            self._later(flight.submit.handle, "the peer is gone", world.case.leased)

    def _wait_for_link(self, flight: Flight, runs: list[Extent], until: int) -> None:
        world = self.owner.world
        if until - world.clock.now > PATIENCE and not flight.reported:
            self._fail(flight, "no answer from the peer")
        world.clock.at(until + world.chance.between(world.chance.delays.engine), self._land, flight, runs)

    # -- the replacement of the engine -----------------------------------------------------------------

    def _look_at(self, handle: int) -> None:
        """A handle has been of unknown fate for too long."""
        if self.owner.held(self._look_at, handle):
            return
        if self.owner.alive and self._suspects.get(handle) == self._number:
            retired = self._side.retire_engine()
            assert retired == self._number
            self._number += 1
            self.owner.world.count_fault("engine replaced")
            self.owner.world.clock.after(DRAIN, self._destroy, retired)

    def _destroy(self, engine: int) -> None:
        if not self.owner.alive or self.owner.held(self._destroy, engine):
            return
        self._suspects = {handle: number for handle, number in self._suspects.items() if number > engine}
        for flight in self._flights.values():
            if flight.engine <= engine and flight.frozen is None:
                self._read(flight, -1)
                flight.frozen = self.owner.kv.copy()
        self._apply(self._side.engine_replaced(engine))
        self.owner.world.clock.after(self.owner.world.case.tail, self._tail_passed, engine)

    def _tail_passed(self, engine: int) -> None:
        if not self.owner.alive or self.owner.held(self._tail_passed, engine):
            return
        for flight in list(self._flights.values()):
            if flight.engine <= engine and flight.frozen is not None and not flight.only_kernel:
                self._drained(flight)
        for peer in self._side.trailing_peers(engine):
            self._heard(engine, peer)

    def _heard(self, engine: int, peer: Peer) -> None:
        """A peer that stands still has not read its kernel: its fence waits for a word of it, and a moment more."""
        if not self.owner.alive or self.owner.held(self._heard, engine, peer):
            return
        target = self.owner.world.incarnated(peer)
        if target.frozen or (target.alive and self.owner.world.clock.now < target.thawed_at + SETTLE):
            self.owner.world.clock.after(SETTLE, self._heard, engine, peer)
        else:
            self._apply(self._side.tail_passed(engine, peer))
