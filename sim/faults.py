"""What is done to a run: each fault of the case, at its time.

Out: `schedule_faults` returns when the last fault is over. A dead instance's processes are all reaped
before the next epoch starts. Peers learn of a death with their own delay, first that nothing can be
expected any more, and once the bounded tail has passed that nothing can land any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim import case as kinds
from sim.case import CRASH, CUT, KILL_RANK, Fault

if TYPE_CHECKING:
    from sim.incarnation import Incarnation
    from sim.rank import RankProcess
    from sim.world import World


def schedule_faults(world: World) -> int:
    over = 0
    for fault in world.case.faults:
        world.clock.at(fault.at, _strike, world, fault)
        over = max(over, fault.at + fault.length + (fault.value if fault.kind == KILL_RANK else 0))
    return over


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
                world.clock.after(delay + world.case.tail, _tell, process, incarnation, reason, True)


def _tell(process: RankProcess, dead: Incarnation, reason: str, quiet: bool) -> None:
    if not process.alive:
        return
    if dead.is_prefill:
        process.receiving.peer_lost(dead.name, dead.epoch, reason, quiet)
    else:
        process.sending.peer_lost(dead.name, dead.epoch, reason, dead=True)
