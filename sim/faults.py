"""What is done to a run: each fault of the case, at its time.

Out: `schedule_faults` returns when the last fault is over. A dead instance's processes are all reaped
before the next epoch starts. Peers learn of a death with their own delay, first that nothing can be
expected any more, and once the bounded tail has passed that nothing can land any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim import case as kinds
from sim.case import CRASH, CUT, MS, SECOND, SILENT_RANK, Fault

if TYPE_CHECKING:
    from sim.incarnation import Incarnation
    from sim.rank import RankProcess
    from sim.world import World

RESTART = 100 * MS  # of an instance that its daemon ended
ABORT_GRACE = 1 * SECOND  # that a leaving instance's log gets to end what is still open
LOOK = 10 * MS


def schedule_faults(world: World) -> int:
    over = 0
    for fault in world.case.faults:
        world.clock.at(fault.at, _strike, world, fault)
        over = max(over, fault.at + fault.length + _preparing(fault))
    return over


def _preparing(fault: Fault) -> int:
    """How long it takes until the instance is down."""
    match fault.kind:
        case kinds.KILL_RANK:
            return fault.value
        case kinds.DRAIN:
            return fault.value + ABORT_GRACE + LOOK
        case _:
            return 0


def _strike(world: World, fault: Fault) -> None:
    if fault.kind == CUT:
        world.count_fault(fault.kind)
        world.cut(f"P{fault.rank}", f"D{fault.value}", world.clock.now + fault.length)
        return
    incarnation = world.instances[fault.instance]
    if incarnation is None or not incarnation.alive:
        return  # down already
    process = incarnation.ranks[fault.rank % len(incarnation.ranks)]
    until = world.clock.now + fault.length
    match fault.kind:
        case kinds.CRASH | kinds.KILL_RANK:
            _kill(world, incarnation, process, fault)
        case kinds.FAIL_QUIET | kinds.FAIL_LATE | kinds.STALL | kinds.LOSE | kinds.CORRUPT:
            if incarnation.is_prefill:
                process.sending.engine.order(fault.kind, fault.value, fault.length)
            return  # counted when it hits a write
        case kinds.HOLD_RELAY:
            before = incarnation.ranks[process.rank - 1].relay
            if process.rank and before is not None:
                before.hold(until)
        case kinds.HOLD_BACK:
            if (back := incarnation.ranks[-1].back) is not None:
                back.hold(until)
        case kinds.HOLD_REPORTS:
            if process.reports is not None:
                process.reports.hold(until)
        case kinds.FREEZE:
            if process.frozen:
                return
            _freeze(world, incarnation, process, fault.length)
        case kinds.SLOW:
            incarnation.ranks[0].slow_down(until, fault.value)
        case kinds.STUTTER:
            process.stutter(until)
        case kinds.DRAIN:
            _drain(world, incarnation, fault)
        case kinds.ADMIN:
            for number in range(fault.value):
                world.clock.after(number * fault.length // fault.value, incarnation.inspect)
        case _:
            raise AssertionError(f"unknown fault {fault.kind}")
    world.count_fault(fault.kind)


def _kill(world: World, incarnation: Incarnation, process: RankProcess, fault: Fault) -> None:
    if fault.kind == CRASH:
        _reap(world, incarnation, fault.length)
    else:
        incarnation.kill(process.rank)
        incarnation.alive = False  # the daemon sees it at once and takes nothing new
        world.clock.after(fault.value, _reap, world, incarnation, fault.length)


def _freeze(world: World, incarnation: Incarnation, process: RankProcess, length: int) -> None:
    since = process.freeze()
    if length <= SILENT_RANK:
        world.clock.after(length, process.thaw, since)
    else:
        world.clock.after(SILENT_RANK, _end_stuck, world, incarnation)


def _end_stuck(world: World, incarnation: Incarnation) -> None:
    """The daemon has heard nothing of a rank for too long: it ends the instance, as it would after a death."""
    if incarnation.alive:
        world.count_fault("freeze ended by the daemon")
        _reap(world, incarnation, RESTART)


def _drain(world: World, incarnation: Incarnation, fault: Fault) -> None:
    incarnation.draining = True
    _let_go(world, incarnation, world.clock.now + fault.value, fault.length)


def _let_go(world: World, incarnation: Incarnation, patience: int, downtime: int) -> None:
    """What is open may end; then its clients are sent elsewhere, and the log gets a moment to end it."""
    if not incarnation.alive:
        return
    now = world.clock.now
    if incarnation.has_open and now < patience + ABORT_GRACE:
        if now >= patience:
            incarnation.let_go()
        world.clock.after(LOOK, _let_go, world, incarnation, patience, downtime)
        return
    _reap(world, incarnation, downtime)


def _reap(world: World, incarnation: Incarnation, downtime: int) -> None:
    """All processes are gone; what they said before is still delivered, then everything open there broke."""
    name = incarnation.name
    for process in incarnation.ranks:
        incarnation.kill(process.rank)
        if world.case.leased:
            world.refuse(process, None)
    incarnation.alive = False
    world.instances[name] = None
    world.from_instance(name, world.gateway.died, incarnation)
    world.clock.after(downtime, world.start, name, incarnation.epoch + 1)
    reason = f"{name} epoch {incarnation.epoch} died"
    for other, peer in world.instances.items():
        if peer is None or peer.is_prefill is incarnation.is_prefill:
            continue
        if incarnation.is_prefill:
            world.break_links(name, other)
        for process in peer.ranks:
            delay = 1 + world.chance.between(world.chance.delays.link) * 20
            world.clock.after(delay, _tell, process, incarnation, reason, False)
            if incarnation.is_prefill:
                process.after_living(delay + world.case.tail, _tell, process, incarnation, reason, True)


def _tell(process: RankProcess, dead: Incarnation, reason: str, quiet: bool) -> None:
    if not process.alive or process.held(_tell, process, dead, reason, quiet):
        return
    if dead.is_prefill:
        process.receiving.peer_lost(dead.name, dead.epoch, reason, quiet)
    else:
        process.sending.peer_lost(dead.name, dead.epoch, reason, dead=True)
