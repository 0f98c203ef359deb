"""A pair of instances in one thread for tests of the core: real cores, FIFO channels, seeded order.

The KV wire between the two instances is a stand-in (the real sides are tested with the real core in
`tests/sim`): it reports what a healthy transfer would, in an arbitrary order.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from consensus.entry import (
    BOOTSTRAP,
    FILL,
    PREALLOC,
    RELEASE,
    SPILL,
    TRANSFER,
    Entry,
    Key,
    PeerRef,
    RequestSpec,
    Return,
    SamplingParams,
    TokenOut,
    Trailer,
)  # fmt: skip
from decode.scheduler import DecodeReplica
from pipeline.effects import (
    Acknowledge,
    CloseRoom,
    CopyFromHost,
    CopyToHost,
    DropHostCopy,
    End,
    FirstToken,
    OpenRoom,
    Relay,
    Reply,
    Report,
    Run,
    SendDestinations,
    Skip,
    StartSender,
    StopRoom,
)  # fmt: skip
from pipeline.local import Observation
from pipeline.planner import Batch, Row
from pipeline.rank import RankCore
from pipeline.replica import ReplicaConfig
from pipeline.sequencer import Sequencer
from prefill.scheduler import PrefillReplica


def token_of(request: str, position: int) -> TokenOut:
    """The reference model: a token depends on the request and the position alone."""
    return TokenOut(100 + sum(request.encode()) * 31 % 97 + position)


class Instance:
    """One instance: its cores, its channels, its executors."""

    def __init__(self, name: str, kind: type, ranks: int, **over: int) -> None:
        base = dict(epoch=1, pp_size=ranks, pages=12, page_size=4, chunk_size=8, max_batch_rows=8, async_depth=1,
                    max_model_len=64, eos_ids=(), stage_timeout=10**12, max_requests=1000)  # fmt: skip
        config = ReplicaConfig(**(base | over))
        self.name, self.ranks = name, ranks
        self.cores = [RankCore(k, ranks, kind(config)) for k in range(ranks)]
        self.sequencer = Sequencer(self.cores[0], ranks, 0)
        self.relay: list[deque[tuple[Entry, Trailer]]] = [deque() for _ in range(ranks)]  # into rank k
        self.back: deque[Acknowledge | Return] = deque()
        self.reports: list[deque] = [deque() for _ in range(ranks)]
        self.queues: list[deque[Batch]] = [deque() for _ in range(ranks)]
        self.ran = [0] * ranks  # last tick each rank's executor finished
        self.tokens: dict[Key, list[int]] = {}
        self.ends: dict[Key, list] = {}
        self.digests: dict[int, set[bytes]] = {}
        self.rows: list[Row] = []  # computed, by rank 0
        self.needless: list[set[int]] = [set() for _ in range(ranks)]  # ticks that the rank need not run
        self.skipped = 0


class Pair:
    """A prefill and a decode instance; `run` steps them until nothing is left to do."""

    def __init__(
        self, seed: int, prefill_ranks: int, decode_ranks: int, prefill: dict | None = None, decode: dict | None = None
    ):
        self.random = random.Random(seed)
        self.clock = 0
        self.held = False  # executors of the prefill side begin nothing
        self.checks = True  # off: only the product's own checks are left
        self.prefill = Instance("P", PrefillReplica, prefill_ranks, **(prefill or {}))
        self.decode = Instance("D", DecodeReplica, decode_ranks, **(decode or {}))
        self.resumed: dict[Key, int] = {}
        self.wire: list[tuple] = []  # pending deliveries, in any order
        self.opened: dict[tuple[str, int, str], int] = {}
        self.destinations: dict[tuple[str, int], set[int]] = {}
        self.finished: dict[tuple[str, int], set[int]] = {}
        self.payload: dict[str, bytes] = {}
        self.stopped: set[str] = set()
        self.host_full: set[str] = set()  # rooms that find no place in host memory
        self.silent: set[str] = set()  # rooms whose decode side never answers

    def submit(self, name: str, prompt: int, out: int, timeout: int = 10**15, resumed: int = 0) -> Key:
        """`prompt` tokens, the last `resumed` of which are output already; `out` more are wanted."""
        key = Key(name, 0)
        self.resumed[key] = resumed
        params = SamplingParams(max_tokens=resumed + out)
        for instance, peer in ((self.prefill, "D"), (self.decode, "P")):
            spec = RequestSpec(key, tuple(range(prompt)), params, PeerRef(peer, "", 1), timeout, resumed)
            instance.sequencer.submit(spec)
        return key

    def cancel(self, key: Key) -> None:
        self.prefill.sequencer.cancel(key, "client")
        self.decode.sequencer.cancel(key, "client")

    # -- stepping --------------------------------------------------------------------------------------

    def run(self, limit: int = 200_000, until=lambda: False) -> None:
        for _ in range(limit):
            if until() or not self.step():
                return
        raise AssertionError("no end in sight: livelock")

    def step(self) -> bool:
        moves: list[tuple[str, Any, int]] = [("wire", None, i) for i in range(len(self.wire))]
        for inst in (self.prefill, self.decode):
            moves += [("relay", inst, k) for k in range(1, inst.ranks) if inst.relay[k]]
            moves += [("report", inst, k) for k in range(inst.ranks) if inst.reports[k]]
            moves += [("run", inst, k) for k in range(inst.ranks) if self._runnable(inst, k)]
            moves += [("back", inst, 0)] if inst.back else []
        self.clock += 10
        if not moves or self.random.random() < 0.3:
            wrote = False
            for inst in (self.prefill, self.decode):
                effects = inst.sequencer.next_entry(self.clock, 0)
                if effects is not None:
                    wrote = True
                    self._perform(inst, 0, effects)
                    self._note(inst, 0)
            if wrote or moves:
                return True
            return False
        kind, inst, k = self.random.choice(moves)
        if kind == "wire":
            self._deliver(self.wire.pop(k))
        elif kind == "relay":
            entry, trailer = inst.relay[k].popleft()
            self._perform(inst, k, inst.cores[k].on_entry(entry, trailer))
            self._note(inst, k)
        elif kind == "report":
            inst.sequencer.report(inst.reports[k].popleft())
        elif kind == "run":
            self._execute(inst, k)
        else:
            item = inst.back.popleft()
            if isinstance(item, Return):
                inst.sequencer.returned(item)
            else:
                inst.sequencer.acknowledged(item.seq, item.ballots)
        return True

    def _runnable(self, inst: Instance, k: int) -> bool:
        if self.held and inst is self.prefill:
            return False
        return bool(inst.queues[k]) and (k == 0 or inst.ran[k - 1] >= inst.queues[k][0].tick)

    def _note(self, inst: Instance, k: int) -> None:
        if not self.checks:
            return
        core = inst.cores[k]
        inst.digests.setdefault(core.cursor.applied, set()).add(core.replica.digest.value)
        assert len(inst.digests[core.cursor.applied]) == 1, f"{inst.name} diverged at {core.cursor.applied}"
        core.replica.audit()

    def _execute(self, inst: Instance, k: int) -> None:
        batch = inst.queues[k].popleft()
        inst.ran[k] = batch.tick
        if batch.tick in inst.needless[k]:
            self._pass_on(inst, k, batch)
            return
        if inst is self.prefill:
            for row in batch.rows:
                if row.sample is not None:
                    self.wire.append(("written", k, row.key.room))
        if k == inst.ranks - 1:
            sampled = [row for row in batch.rows if row.sample is not None]
            tokens = tuple(token_of(row.key.request, row.start + len(row.tokens)) for row in sampled)
            inst.back.append(Return(batch.tick, tokens))
        inst.rows += batch.rows if k == 0 else ()

    def _pass_on(self, inst: Instance, k: int, batch: Batch) -> None:
        """As the executor: a skipped tick takes its turn without content, on all ranks behind as well."""
        inst.skipped += 1
        if k < inst.ranks - 1:
            inst.needless[k + 1].add(batch.tick)
        else:
            unread = tuple(TokenOut(-1) for row in batch.rows if row.sample is not None)
            inst.back.append(Return(batch.tick, unread))

    def _perform(self, inst: Instance, k: int, effects: list) -> None:
        for effect in effects:
            match effect:
                case Relay(entry, trailer):
                    inst.relay[k + 1].append((entry, trailer))
                case Acknowledge():
                    inst.back.append(effect)
                case Report(item):
                    inst.reports[k].append(item)
                case Run(batch):
                    inst.queues[k].append(batch)
                case Skip(tick):
                    if inst.ran[k] < tick:
                        inst.needless[k].add(tick)
                case Reply(key, position, tokens):
                    told = inst.tokens.setdefault(key, [])
                    assert position == self.resumed[key] + len(told)
                    told += [t.token for t in tokens]
                case End(key, outcome):
                    inst.ends.setdefault(key, []).append(outcome)
                case OpenRoom(key, _, _):
                    if inst is self.decode:
                        self.wire.append(("shake", k, key.room))
                    else:
                        self.opened[key.room, k, "P"] = 1
                        self._check_bootstrap(key.room, k)
                case SendDestinations(room, _):
                    if room not in self.silent:
                        self.wire += [("destinations", p, room, k) for p in range(self.prefill.ranks)]
                case FirstToken(room, payload):
                    if k == self.prefill.ranks - 1:
                        self.payload[room] = payload
                        self.wire.append(("first", k, room))
                case StopRoom(room, _):
                    self.stopped.add(room)
                    self.wire.append(("quiet", inst, k, room))
                case CopyToHost(room, stage_seq, pages):
                    good = room not in self.host_full
                    assert pages
                    self.wire.append(
                        ("copied", inst, k, Observation(room, SPILL, good, "host memory is full", b"", stage_seq))
                    )
                case CopyFromHost(room, stage_seq, _):
                    self.wire.append(("copied", inst, k, Observation(room, FILL, True, "", b"", stage_seq)))
                case DropHostCopy(room):
                    self.wire.append(("dropped", inst, k, Observation(room, RELEASE, True)))
                case StartSender() | CloseRoom():
                    pass

    # -- the stand-in wire -----------------------------------------------------------------------------

    def _check_bootstrap(self, room: str, p: int) -> None:
        if len(self.destinations.get((room, p), ())) == self.decode.ranks and (room, p, "P") in self.opened:
            self._observe(self.prefill, p, Observation(room, BOOTSTRAP, True))

    def _deliver(self, item: tuple) -> None:
        match item:
            case ("shake", d, room):
                self._observe(self.decode, d, Observation(room, PREALLOC, True))
            case ("destinations", p, room, d):
                self.destinations.setdefault((room, p), set()).add(d)
                self._check_bootstrap(room, p)
            case ("written", p, room) if room not in self.stopped:
                self._observe(self.prefill, p, Observation(room, TRANSFER, True))
                self.wire += [("finished", d, room, p) for d in range(self.decode.ranks)]
            case ("first", p, room) if room not in self.stopped:
                self.wire += [("finished", d, room, -1) for d in range(self.decode.ranks)]
            case ("finished", d, room, p):
                done = self.finished.setdefault((room, d), set())
                done.add(p)
                if len(done) == self.prefill.ranks + 1:
                    self._observe(self.decode, d, Observation(room, TRANSFER, True, "", self.payload[room]))
            case ("dropped", inst, k, observation) if self._copies_under_way(inst, k, observation.room):
                self.wire.append(item)  # this rank's copies are done in order
            case ("copied" | "dropped", inst, k, observation):
                self._observe(inst, k, observation)
            case ("quiet", inst, k, room):
                self._observe(inst, k, Observation(room, RELEASE, True))

    def _copies_under_way(self, inst: Instance, k: int, room: str) -> bool:
        return any(i[0] == "copied" and i[1] is inst and i[2] == k and i[3].room == room for i in self.wire)

    def _observe(self, inst: Instance, k: int, observation: Observation) -> None:
        if k == 0:
            inst.sequencer.observe(observation)
        else:
            self._perform(inst, k, inst.cores[k].observe(observation))

    # -- what must hold at the end -----------------------------------------------------------------------

    def assert_clean(self) -> None:
        """Invariant 4: after the last request ended nothing of it is left anywhere."""
        for inst in (self.prefill, self.decode):
            for core in inst.cores:
                replica = core.replica
                assert not replica.requests and not replica.rooms and not len(core.local) and not len(core.store)
                assert replica.leases.count()["free"] == replica.config.pages
                assert replica.slots.in_flight == 0
                assert not any(replica.states.values())
            queues = inst.sequencer.queues()
            assert not any(queues.values()), queues
            assert all(len(outcomes) == 1 for outcomes in inst.ends.values())
