"""A restored replica answers the same entries with the same digests, wherever the recording starts."""

from __future__ import annotations

import msgspec
import pytest

from consensus.entry import Entry
from pipeline import snapshot
from pipeline.replica import Replica
from pipeline.snapshot import Snapshot
from tests.pipeline.ring import Instance, Pair


def replay(replica: Replica, entries: list[tuple[Entry, bytes]]) -> None:
    for entry, digest in entries:
        replica.apply(entry)
        if entry.launch is not None:
            replica.launch(entry.launch)
        replica.fold()
        assert replica.digest.value == digest, f"seq {entry.seq}"


@pytest.mark.parametrize("seed", range(12))
def test_a_run_replays_from_any_point_to_the_same_digests(seed: int) -> None:
    pair = Pair(seed, 1 + seed % 3, 2)
    keys = [pair.submit(f"r{i}", prompt=1 + (7 * i) % 25, out=1 + i % 7) for i in range(10)]
    taken: dict[str, tuple[bytes, int]] = {}
    moment = pair.random.randrange(100, 3000)
    pair.run(until=lambda: pair.clock > moment)
    for inst in (pair.prefill, pair.decode):
        core = inst.cores[0]
        taken[inst.name] = msgspec.msgpack.encode(snapshot.take(core.replica)), core.cursor.applied
    pair.cancel(keys[3])
    pair.run()

    def check(inst: Instance) -> None:
        data, seq = taken[inst.name]
        saved = msgspec.msgpack.decode(data, type=Snapshot)
        records = [r for r in inst.cores[0].recorder.records() if r.entry.seq > seq]
        assert len(records) > 5
        replay(snapshot.restore(saved, type(inst.cores[0].replica)), [(r.entry, r.digest) for r in records])

    check(pair.prefill)
    check(pair.decode)
