"""How long a room that is ready waits for its admission: Paceline's rule beside two published ones.

In: a number of requests and a seed. Out: per rule the waits in seconds, as JSON on standard output. All
three rules see the same pipeline (ranks whose forwards take one second each and never pause), the same
moments at which rooms become ready, and the same message delays.

- `log`: the real core in the simulator: report to rank 0, an entry, relayed on receipt.
- `ring`: a vote rides on the pipeline's own messages, one hop per forward, up all ranks and around again
  as a verdict (as described in sglang #34815).
- `store`: rank 0 looks into its store once per forward; what it concludes goes down the chain one hop per
  forward (as described in sglang #38206).

The two published rules are modelled from their descriptions: only their waiting for forwards is.
"""

from __future__ import annotations

import json
import random
import sys

from pipeline.local import Observation
from sim.case import SECOND, Case, Delays, InstancePlan, RequestPlan
from sim.rank import RankProcess
from sim.world import World

FORWARD = 1 * SECOND
DELAYS = Delays(straggler=0.01)


def measure_log(ranks: int, requests: int, seed: int) -> tuple[list[int], list[list[int]]]:
    """Waits of the real core, and for each room the moments (µs) at which its ranks became ready."""
    chance = random.Random(seed)
    moments = sorted(chance.randrange(requests * SECOND) for _ in range(requests))
    plans = tuple(RequestPlan(f"r{i}", at, 8, 1, ignore_eos=True) for i, at in enumerate(moments))
    case = Case(
        seed=seed,
        prefill=(InstancePlan(ranks=ranks, pages=4096, forward=(FORWARD,)),),
        decode=(InstancePlan(ranks=1, pages=4096),),
        requests=plans,
        layers=ranks,
        delays=DELAYS,
    )
    world = World(case)
    ready: dict[str, list[int]] = {}
    admitted: dict[str, int] = {}

    def notice(process: RankProcess, seen: Observation) -> None:
        if seen.topic == "bootstrap":
            ready.setdefault(seen.room, []).append(world.clock.now)

    def look(process: RankProcess) -> None:
        if process.core.last:
            for request in process.core.replica.requests.values():
                if request.state != "bootstrapping":
                    admitted.setdefault(request.key.room, world.clock.now)

    world.observers.append(notice)
    incarnation = world.instances["P0"]
    assert incarnation is not None
    incarnation.watchers.append(look)
    result = world.run()
    assert not result.violation, result.violation
    rooms = [room for room in ready if len(ready[room]) == ranks]
    return [admitted[room] - max(ready[room]) for room in rooms], [ready[room] for room in rooms]


class Pipeline:
    """Ranks that loop without a pause: rank k begins an iteration at k·F/P + n·F, and reads messages only then."""

    def __init__(self, ranks: int, chance: random.Random) -> None:
        self.ranks, self._chance = ranks, chance

    def next_read(self, rank: int, moment: int) -> int:
        phase = rank * FORWARD // self.ranks
        return moment + (phase - moment) % FORWARD

    def hop(self, rank: int, moment: int) -> int:
        """When `rank` acts on a message sent at `moment`; what it passes on leaves when its iteration ends."""
        return self.next_read(rank, moment + self._chance.randint(*DELAYS.ring))

    def ring(self, ready: list[int]) -> int:
        """One vote around the ring, each rank adding its own; one verdict around the ring."""
        moment = self.next_read(0, max(ready))
        for rank in (*range(1, self.ranks), 0, *range(1, self.ranks)):
            moment = self.hop(rank, moment + FORWARD)
        return moment - max(ready)

    def store(self, ready: list[int]) -> int:
        """Reports are in rank 0's store after a message; the decision goes down the chain."""
        moment = self.hop(0, max(ready))
        for rank in range(1, self.ranks):
            moment = self.hop(rank, moment + FORWARD)
        return moment - max(ready)


def compare(ranks: int, requests: int, seed: int) -> dict[str, list[float]]:
    """Seconds waited, by rule."""
    waits, ready = measure_log(ranks, requests, seed)
    pipeline = Pipeline(ranks, random.Random(seed + 1))
    found = {"log": waits, "ring": [pipeline.ring(r) for r in ready], "store": [pipeline.store(r) for r in ready]}
    return {name: [wait / SECOND for wait in all_waits] for name, all_waits in found.items()}


if __name__ == "__main__":
    arguments = [int(text) for text in sys.argv[1:]] or [8, 200, 1]
    json.dump(compare(*arguments), sys.stdout)
