"""The real core under every schedule, for small bounds: `python -m sim.exhaustive [--deep] [--plant BUG]`.

In: bounds (a role, 1 to 3 ranks, one or two requests, what may fail, what may be late). Out: how many schedules
there are, in how many states, after all of them were checked; or the first schedule that breaks an invariant,
told as a story. The other side of the hand-over is an environment that may make any observation that is legal
then (`sim.exhaustive_ports`), and client and clock may strike between any two steps.

What is a choice: when rank 0 writes an entry; when each rank makes each observation, good or bad; when a bell,
a store update, an acknowledgement with its votes, or a tick's tokens reach rank 0; when an abort comes, when the
clock passes a deadline. What is not: how far a follower lags. A follower takes entries from one FIFO channel and
is a Kahn process: what it decides and sends depends on the sequence of entries and on the places in it at which
it made its observations, never on when. Take any run with lagging followers; let each follower apply each entry
as soon as it is written, and make its observations at the same places of the log. The log is the same, each
channel to rank 0 carries the same items in the same order and no later, so rank 0, which here may hear them as
late as it likes, can still take them exactly when it did. So going round at once and hearing late covers every
lag. `sample` checks the argument on random schedules in which each hop is a step of its own.

Schedules that meet in one state have one future, so each state is expanded once (`sim.exhaustive_state` says
why that is sound). Schedules are counted over the finished graph; a cycle in it would be a livelock.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from consensus.entry import BOOTSTRAP, FILL, PREALLOC, SPILL, TRANSFER, Entry
from consensus.recorder import story
from sim.exhaustive_bugs import BUGS, planted
from sim.exhaustive_state import check_known, fingerprint, freeze, thaw
from sim.exhaustive_world import Action, Bounds, Violation, World

ONE, TWO, LONG = ((3, 3),), ((3, 2), (3, 2)), ((1, 4), (1, 4))
AT_ONCE: tuple[str, ...] = ()

# A pool of six pages of one token: two requests of four tokens get in and cannot both stay.
_RETRACT = Bounds(
    "decode, retract", False, 2, LONG, AT_ONCE, 2, pages=6, page_size=1, caution=100,
    prompt_topics=(PREALLOC, TRANSFER), bad=(),
)  # fmt: skip
_TURNS = Bounds(
    "prefill, two take turns in a page", True, 2, TWO, AT_ONCE, pages=1, prompt_topics=(BOOTSTRAP,), bad=(TRANSFER,)
)
DEFAULT = (
    Bounds("prefill, all late", True, 2, ONE),
    Bounds("decode, all late", False, 2, ONE),
    Bounds("prefill", True, 3, ONE, AT_ONCE),
    Bounds("decode", False, 3, ONE, AT_ONCE),
    Bounds("prefill, three chunks", True, 2, ((5, 2),), AT_ONCE, chunk_size=2),
    Bounds("prefill, first token is the last", True, 2, ((3, 1),), AT_ONCE),
    Bounds("decode, first token is the last", False, 2, ((3, 1),), AT_ONCE),
    Bounds("decode, deadlines", False, 2, ONE, AT_ONCE, clock=(20,), timeout=10),
    replace(_TURNS, aborts=0),
    Bounds("decode, two, verdicts late", False, 2, TWO, ("back",), aborts=0, bad=()),
    _RETRACT,
    replace(_RETRACT, ranks=3),
    replace(_RETRACT, name="decode, retract, verdicts late", late=("back",), aborts=0),
    replace(_RETRACT, name="decode, retract, copies fail", bad=(SPILL, FILL)),
)
DEEP = (
    replace(_TURNS, name="prefill, take turns, an abort"),
    Bounds("prefill, both deadlines", True, 2, ONE, AT_ONCE, clock=(7, 20), timeout=10),
    Bounds("decode, both deadlines", False, 2, ONE, AT_ONCE, clock=(7, 20), timeout=10),
    Bounds("prefill, verdicts late", True, 3, ONE, ("back",)),
    Bounds("decode, verdicts late", False, 3, ONE, ("back",)),
)


@dataclass(frozen=True, slots=True)
class Result:
    bounds: Bounds
    schedules: int  # maximal ones, each a different sequence of choices
    states: int
    steps: int  # edges of the graph, each carried out and checked once
    seconds: float


class Counterexample(Exception):
    """A schedule after which something is wrong."""

    def __init__(self, bounds: Bounds, path: Sequence[Action], why: str, lag: bool = False) -> None:
        super().__init__(why)
        self.bounds, self.path, self.why, self.lag = bounds, tuple(path), why, lag

    def story(self) -> str:
        """The schedule again, with every entry, vote and decision of each rank."""
        world = World(self.bounds, self.lag, record=True)
        assert world.lines is not None
        lines = [f"bounds: {self.bounds}"]
        for number, action in enumerate(self.path, 1):
            lines.append(f"{number}. {' '.join(str(part) for part in action)}")
            try:
                world.act(action)
            except Exception as error:
                world.lines.append(f"{type(error).__name__}: {error}")
            lines += [f"     {line}" for line in (*world.lines, *_decisions(world))]
            world.lines.clear()
        lines.append(f"=> {self.why}")
        for core in world.cores:
            for i in range(len(self.bounds.requests)):
                lines.append(f"story of r{i} on rank {core.rank}:")
                lines += [f"     {line}" for line in story(core.recorder.records(), f"r{i}")]
        return "\n".join(lines)


def _decisions(world: World) -> list[str]:
    """What the last action put into the log, and what each rank made of it."""
    lines: list[str] = []
    told: dict[int, str] = {}
    for core in world.cores:
        for record in core.recorder.fresh():
            seq, decided = record.entry.seq, str(list(record.notes))
            if core.rank == 0:
                lines.append(f"seq {seq}: {_content(record.entry)}")
            if told.get(seq) != decided:
                lines.append(f"seq {seq}: rank {core.rank} decides {decided}")
                told[seq] = decided
    return lines


def _content(entry: Entry) -> str:
    said = [f"opens {spec.key.room}" for spec in entry.requests]
    said += [f"aborts {abort.key.room} ({abort.reason})" for abort in entry.aborts]
    said += [f"admits {item.key.room}: {'ok' if item.ok else item.reason}" for item in entry.admissions]
    for verdict in entry.verdicts:
        good, bad = ([stage.key.room for stage, _ in part] for part in (verdict.good, verdict.bad))
        said.append(f"verdict on {verdict.topic} of seq {verdict.ballot_seq}: good {good}, bad {bad}")
    said += [f"tick {item.tick} returned {[token.token for token in item.tokens]}" for item in entry.returns]
    said += [f"ballot on {topic}" for topic in entry.ballots]
    if entry.launch is not None:
        said.append(f"launches tick {entry.launch.tick}")
    return "; ".join(said) or "heartbeat"


@dataclass(slots=True)
class Search:
    """Depth first over the graph of states. `merge` off walks the tree of schedules instead, to check the counting."""

    bounds: Bounds
    merge: bool = True
    steps: int = 0
    _counts: dict[bytes, int] = field(default_factory=dict)
    _open: dict[bytes, None] = field(default_factory=dict)  # states on the present path
    _path: list[Action] = field(default_factory=list)

    def run(self) -> Result:
        start = time.process_time()
        collecting = gc.isenabled()
        gc.disable()  # worlds are plain trees, and counting references frees them
        try:
            world = World(self.bounds)
            check_known(world)
            first = fingerprint(world)
            self._open[first] = None
            schedules = self._visit(world, first)
        finally:
            if collecting:
                gc.enable()
        return Result(self.bounds, schedules, len(self._counts), self.steps, time.process_time() - start)

    def _visit(self, world: World, state: bytes) -> int:
        frozen, schedules, progress = freeze(world), 0, False
        spare: World | None = world  # equal to `frozen`
        for action, owed in world.actions():
            world = thaw(frozen) if spare is None else spare
            spare = None
            self._path.append(action)
            if self._act(world, action):
                progress |= owed
                self.steps += 1
                schedules += self._after(world)
            else:
                spare = world
            self._path.pop()
        if not progress:
            self._check_end(thaw(frozen) if spare is None else spare)
        schedules = schedules or 1
        self._counts[state] = schedules
        return schedules

    def _after(self, world: World) -> int:
        state = fingerprint(world)
        if state in self._open:
            raise Counterexample(self.bounds, self._path, "livelock: this state was on the way here already")
        if self.merge and state in self._counts:
            return self._counts[state]
        self._open[state] = None
        schedules = self._visit(world, state)
        del self._open[state]
        return schedules

    def _act(self, world: World, action: Action) -> bool:
        try:
            return world.act(action)
        except Exception as error:  # whatever it is, this schedule must not do it
            raise Counterexample(self.bounds, self._path, f"{type(error).__name__}: {error}") from error

    def _check_end(self, world: World) -> None:
        try:
            world.check_end()
        except Violation as error:
            raise Counterexample(self.bounds, self._path, str(error)) from error


def search(bounds: Bounds) -> Result:
    """All schedules of `bounds`; raises `Counterexample`."""
    return Search(bounds).run()


def sample(bounds: Bounds, seeds: range) -> int:
    """Random schedules in which every hop of every entry is a step of its own; returns how many steps they had."""
    steps = 0
    for seed in seeds:
        chance, world, path = random.Random(seed), World(bounds, lag=True), []
        while True:
            actions = world.actions()
            chance.shuffle(actions)
            # Aborts and clocks are rarer than the rest, or few requests would get anywhere.
            choice = next(((a, o) for a, o in actions if o or chance.random() < 0.1), None)
            for action, _owed in [choice, *actions] if choice else actions:
                path.append(action)
                try:
                    done = world.act(action)
                except Exception as error:
                    raise Counterexample(bounds, path, f"{type(error).__name__}: {error}", lag=True) from error
                if done:
                    break
                path.pop()
            else:
                break
            steps += 1
        try:
            world.check_end()
        except Violation as error:
            raise Counterexample(bounds, path, str(error), lag=True) from error
    return steps


def show(result: Result) -> str:
    bounds = result.bounds
    return (
        f"{bounds.name:34} {bounds.ranks} ranks {len(bounds.requests)} requests {result.schedules:>26,} schedules"
        f" {result.states:>8,} states {result.steps:>9,} steps {result.seconds:6.1f} s"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.exhaustive", description=__doc__.splitlines()[0])
    parser.add_argument("--deep", action="store_true", help="the larger bounds as well: two more minutes")
    parser.add_argument("--plant", choices=sorted(BUGS), help="plant this bug and tell the schedule that shows it")
    options = parser.parse_args(arguments)
    if options.plant:
        with planted(options.plant):
            try:
                search(BUGS[options.plant].bounds)
            except Counterexample as found:
                print(found.story())
                return 0
        print(f"{options.plant} was not found")
        return 1
    try:
        results = []
        for bounds in (*DEFAULT, *(DEEP if options.deep else ())):
            results.append(search(bounds))
            print(show(results[-1]), flush=True)
        steps = sum(sample(bounds, range(40)) for bounds in DEFAULT)
        print(f"{40 * len(DEFAULT)} random schedules with lagging followers, {steps} steps: the same checks hold")
    except Counterexample as found:
        print(found.story())
        return 1
    seconds = sum(result.seconds for result in results)
    schedules, total = sum(r.schedules for r in results), sum(r.steps for r in results)
    print(
        f"{schedules:,} schedules, all of them; {total / seconds:,.0f} steps and {schedules / seconds:,.0f} schedules/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
