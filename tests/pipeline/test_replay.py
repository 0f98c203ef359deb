"""A planted divergence is found again, offline, from the two ranks' recordings."""

from __future__ import annotations

import msgspec
import pytest

from consensus import recorder
from consensus.entry import Key
from consensus.log import Diverged
from consensus.recorder import Flight, Header
from decode.scheduler import DecodeReplica
from pipeline import snapshot
from pipeline.lease import REQUEST
from pipeline.replay import difference, replay
from tests.pipeline.ring import Pair


def test_replay_and_diff_name_the_planted_difference() -> None:
    pair = Pair(7, 1, 3)
    pair.checks = False
    start = msgspec.msgpack.encode(snapshot.take(pair.decode.cores[0].replica))
    pair.submit("r", prompt=9, out=6)
    pair.decode.cores[1].replica.leases.open(Key("ghost", 0), 1, REQUEST)
    with pytest.raises(Diverged):
        pair.run()
    flights = [Flight(Header("decode", "D", 1, k, start), pair.decode.cores[k].recorder.records()) for k in range(2)]
    flights = [recorder.read(b"".join(map(recorder.frame, (f.header, *f.records)))) for f in flights]
    found = difference(*flights)
    assert (
        found is not None and found.left == ("pages", "r", 0, (0, 1, 2)) and found.right == ("pages", "r", 0, (1, 2, 3))
    )
    healthy, wrong = (list(replay(flight, DecodeReplica)) for flight in flights)
    assert all(step.same for step in healthy)
    first_wrong = next(step for step in wrong if not step.same)
    assert first_wrong.record.entry.seq == found.entry.seq, "the rank that deviates from its own log is the faulty one"
    assert "pages" in str(found) and f"seq {found.entry.seq}" in str(found)
