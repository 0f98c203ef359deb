"""One simulated run: builds the cluster of a case, lets time pass, and says what broke.

In: a `Case`. Out: a `Result`; equal cases give equal traces. The run goes on until every request has
ended, then probes each pair with one more request that must succeed, then waits until nothing is left
anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from consensus.entry import Key
from consensus.recorder import story
from sim.case import HURRY, SECOND, Case, RequestPlan
from sim.channel import Channel
from sim.clock import Chance, Clock, Violation
from sim.coverage import Coverage
from sim.faults import schedule_faults
from sim.gateway import GatewayModel
from sim.incarnation import Incarnation
from transfer.actions import Peer, Submit
from transfer.plan import Shard, Topology

if TYPE_CHECKING:
    from pipeline.local import Observation
    from pipeline.planner import Row
    from sim.rank import RankProcess

PATIENCE = 240 * SECOND  # after the last plan and fault, for everything to end
MOST_EVENTS = 3_000_000


@dataclass
class Result:
    case: Case
    violation: str = ""
    events: int = 0
    virtual: int = 0
    trace: str = ""
    coverage: Coverage = field(default_factory=Coverage)
    outcomes: dict[str, str] = field(default_factory=dict)
    world: World | None = None


class World:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.clock = Clock()
        self.chance = Chance(case.seed * 2 + 1, case.delays)
        self.coverage = Coverage()
        self._trace = blake2b(digest_size=16)
        self._cuts: dict[tuple[str, str], int] = {}  # (prefill, decode) → until when
        self._fenced: dict[tuple[Peer, Peer, str], bool] = {}  # True: for ever
        self._incarnations: dict[tuple[str, int], Incarnation] = {}
        self.observers: list[Callable[[RankProcess, Observation], None]] = []
        self.plans = {f"P{i}": plan for i, plan in enumerate(case.prefill)}
        self.plans |= {f"D{i}": plan for i, plan in enumerate(case.decode)}
        self._topologies = {name: self._topology(plan.ranks) for name, plan in self.plans.items()}
        bounds = case.delays.link
        self._ways = {
            (name, way): Channel(self.clock, self.chance, bounds, _call) for name in self.plans for way in (0, 1)
        }
        self.gateway = GatewayModel(self)
        self.epochs: dict[str, int] = {}  # as the gateway knows them
        self.instances: dict[str, Incarnation | None] = {}
        for name in self.plans:
            self.start(name, 1)
        for request in case.requests:
            self.gateway.schedule(request)
        self.busy_until = max((request.at for request in case.requests), default=0)
        self.busy_until = max(self.busy_until, schedule_faults(self))
        self._probed = False
        self.clock.at(self.busy_until, self._look)

    # -- running -------------------------------------------------------------------------------------

    def run(self) -> Result:
        result = Result(self.case, coverage=self.coverage, world=self)
        try:
            self.clock.run(MOST_EVENTS)
            if not self.clock.stopped:
                raise Violation(f"no end after {self.clock.events} events")
        except Violation as violation:
            result.violation = str(violation)
        except Exception as error:  # an assertion or `Diverged` of the core: the rank would fail-stop
            result.violation = f"{type(error).__name__}: {error}{_where(error)}"
        for client in self.gateway.clients.values():
            result.outcomes[client.plan.name] = client.outcome
            self._trace.update(f"{client.plan.name} {client.outcome} {client.delivered}".encode())
        result.events, result.virtual = self.clock.events, self.clock.now
        self._trace.update(f"{result.events} {result.virtual} {result.violation}".encode())
        result.trace = self._trace.hexdigest()
        return result

    def _look(self) -> None:
        """Is everything over? Asked now and then once the schedule has run out."""
        gateway = self.gateway
        step = 100_000
        if gateway.waiting or gateway.scheduled:
            if self.clock.now > self.busy_until + PATIENCE:
                open_ = [c.plan.name for c in gateway.clients.values() if not c.over]
                raise Violation(f"no progress: {open_} never ended; {self._leftovers()[:6]}")
        elif not self._probed:
            self._probed = True
            self._probe()
        elif not (left := self._leftovers()):
            self._judge()
            self.clock.stop()
            return
        elif self.clock.now > self.busy_until + 2 * PATIENCE:
            raise Violation(f"left behind after the last request: {left[:8]}")
        else:
            step = min(5 * SECOND, 100_000 + (self.clock.now - self.busy_until) // 4)
        self.clock.after(step, self._look)

    def _probe(self) -> None:
        """With all faults over, every pair must work again (no blacklist, no lost page)."""
        if not self.case.faults:
            return
        for incarnation in self.instances.values():
            if incarnation is not None and incarnation.is_prefill:
                for process in incarnation.ranks:
                    process.sending.engine.pardon()
        decodes = [name for name in self.plans if name[0] == "D"]
        prefills = [name for name in self.plans if name[0] == "P"]
        for number in range(max(len(decodes), len(prefills))):
            pair = (prefills[number % len(prefills)], decodes[number % len(decodes)])
            plan = RequestPlan(f"probe{number}", self.clock.now + 1, 5, 3)
            self.gateway.schedule(plan, pair)

    def _judge(self) -> None:
        if bad := self.gateway.excuses():
            raise Violation("; ".join(bad[:3]))
        for incarnation in self._incarnations.values():
            incarnation.check_outboxes()
        hurried = any(plan.stage_timeout < HURRY for plan in self.plans.values())
        for name, client in self.gateway.clients.items():
            if hurried or not name.startswith("probe"):
                continue
            reasons = [attempt.merge.finish for attempt in client.attempts]
            # An engine that an earlier fault doomed may take a probe's write with it: one more attempt, no more.
            # A rank that parks next to nothing refuses all but one of the probes that come early.
            doomed = [reason for reason in reasons if reason and "engine was replaced" in reason.reason]
            crowded = [reason for reason in reasons if reason and "too many destinations" in reason.reason]
            if client.outcome != "ok" or len(reasons) > 1 + len(doomed[:1]) + len(crowded):
                raise Violation(f"{name} after all faults were over: {client.outcome}, {reasons}")

    def _leftovers(self) -> list[str]:
        found: list[str] = []
        for name, incarnation in self.instances.items():
            found += [f"{name} is down"] if incarnation is None else incarnation.leftovers()
        return found

    # -- instances -----------------------------------------------------------------------------------

    def start(self, name: str, epoch: int) -> None:
        incarnation = Incarnation(self, name, epoch, self.plans[name], name[0] == "P")
        self.instances[name] = self._incarnations[name, epoch] = incarnation
        self.epochs[name] = epoch

    def topology(self, name: str) -> Topology:
        return self._topologies[name]

    def _topology(self, ranks: int) -> Topology:
        layers = self.case.layers
        cuts = [layers * rank // ranks for rank in range(ranks + 1)]
        shards = tuple(Shard(rank, (cuts[rank], cuts[rank + 1]), (0, 1)) for rank in range(ranks))
        return Topology.uniform(shards, self.case.page_size, 1)

    def process(self, instance: str, rank: int) -> RankProcess | None:
        """Who answers at that rank's address now."""
        incarnation = self.instances[instance]
        if incarnation is None or not incarnation.ranks[rank].alive:
            return None
        return incarnation.ranks[rank]

    def incarnated(self, peer: Peer) -> RankProcess:
        return self._incarnations[peer.instance, peer.epoch].ranks[peer.rank]

    def choose_pair(self, before: dict[Any, str] | None) -> tuple[str, str]:
        """A pair of instances; after a failure preferably another one."""
        chosen: list[str] = []
        avoid = list(before.values()) if before else []
        for letter in "PD":
            names = [name for name in self.plans if name[0] == letter]
            others = [name for name in names if name not in avoid] or names
            chosen.append(others[int(self.chance.draw() * len(others))])
        return chosen[0], chosen[1]

    # -- the network -----------------------------------------------------------------------------------

    def cut(self, prefill: str, decode: str, until: int) -> None:
        self._cuts[prefill, decode] = max(until, self._cuts.get((prefill, decode), 0))
        self.break_links(prefill, decode)

    def break_links(self, prefill: str, decode: str) -> None:
        incarnation = self.instances[decode]
        for process in incarnation.ranks if incarnation is not None else ():
            for link in list(process.receiving.links.get(prefill, {}).values()):
                server = link.server
                link.break_off()
                if server is not None:
                    server.lost_sight(link)

    def cut_until(self, prefill: str, decode: str) -> int:
        return self._cuts.get((prefill, decode), 0)

    def to_instance(self, name: str, action: Callable[..., object], *args: object) -> None:
        self._ways[name, 0].send((action, args))

    def from_instance(self, name: str, action: Callable[..., object], *args: object) -> None:
        self._ways[name, 1].send((action, args))

    def gateway_hears(self, incarnation: Incarnation, key: Key, said: object) -> None:
        self.from_instance(incarnation.name, self.gateway.hears, incarnation, key, said)

    # -- what is checked, counted, traced ---------------------------------------------------------------

    def attempt(self, key: Key) -> int:
        return self.gateway.numbers[key]

    def token(self, key: Key, position: int) -> int:
        return self.gateway.token(key, position)

    def check_row(self, process: RankProcess, row: Row) -> None:
        text = self.gateway.text(row.key)
        if row.tokens != text[row.start : row.start + len(row.tokens)]:
            raise Violation(f"{process.name} runs {row.tokens} at {row.start} of {row.key.room}: not its text")

    def fenced(self, source: RankProcess, target: Peer, room: str, for_ever: bool) -> None:
        """`source` has said to `target` that nothing of this room will land any more, or not unless it is asked to."""
        if source.sending.engine.writing.get((target, room)):
            raise Violation(f"{source.name} tells {target} that {room} is quiet, but a write is on its way")
        self._fenced[source.sending.identity, target, room] = for_ever

    def asked_again(self, source: RankProcess, target: Peer, room: str) -> None:
        if self._fenced.get((source.sending.identity, target, room)) is False:
            del self._fenced[source.sending.identity, target, room]

    def refuse(self, target: RankProcess, room: str | None) -> None:
        for incarnation in self._incarnations.values():
            if incarnation.is_prefill:
                for process in incarnation.ranks:
                    process.sending.engine.refused(target, room)

    def check_fence(self, source: RankProcess, submit: Submit) -> None:
        if (source.sending.identity, submit.peer, submit.room) in self._fenced:
            raise Violation(f"{source.name} writes for {submit.room} to {submit.peer} after it said it would not")

    def noticed(self, process: RankProcess, observation: Observation) -> None:
        for observer in self.observers:
            observer(process, observation)

    def count_fault(self, kind: str) -> None:
        if kind:
            self.coverage.faults[kind] += 1

    def trace(self, incarnation: Incarnation, seq: int, digest: bytes) -> None:
        self._trace.update(b"%d %s %d %d" % (self.clock.now, incarnation.name.encode(), incarnation.epoch, seq))
        self._trace.update(digest)

    def story(self, request: str) -> list[str]:
        """Everything rank 0 of each incarnation decided about a request."""
        lines: list[str] = []
        for (name, epoch), incarnation in self._incarnations.items():
            told = story(incarnation.ranks[0].core.recorder.records(), request)
            lines += [f"{name}#{epoch} {line}" for line in told]
        return lines


def _call(item: tuple[Callable[..., object], tuple[object, ...]]) -> None:
    item[0](*item[1])


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" (at {trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno})"


def simulate(case: Case) -> Result:
    return World(case).run()
