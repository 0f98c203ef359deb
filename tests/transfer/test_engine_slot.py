"""A port whose engine is replaced: local engines that fail at will, a clock that is turned by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.transfer.pools import Pool, pipeline
from tests.transfer.rig import DECODE, HOST, PREFILL, terms
from transfer.actions import Observe, Peer
from transfer.io import sending_port
from transfer.io.engine import EngineError
from transfer.io.local import LocalEngine, LocalNetwork
from transfer.io.receiving_port import ReceivingPort
from transfer.io.sending_port import SendingPort

ONE = pipeline(1, 2)
LAYERS = (0, 2)
FOUR = 4 * 2 * 64  # bytes of a prompt of four positions


class Stubborn(LocalEngine):
    """Its library hangs at the end, until it is let go."""

    def __init__(self, network: LocalNetwork) -> None:
        super().__init__(network)
        self.closable = True

    def close(self) -> bool:
        return self.closable and super().close()


class Pair:
    """A sender and a receiver, one rank each. The test plays both logs and the clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.network = LocalNetwork(manual=True)
        self.src, self.dst = Pool(ONE, 0, 16, seed=1), Pool(ONE, 0, 16)
        self.starts: list[float] = []
        self.refusals = 0  # starts that fail
        self.gate = threading.Event()  # that a start waits for
        self.gate.set()
        self.sender = SendingPort(
            Peer(PREFILL, 1, 0),
            ONE,
            self.src.regions,
            Stubborn(self.network),
            terms("local"),
            HOST,
            clock=lambda: self.now,
            engine_factory=self.start,
        )
        self.receiver = ReceivingPort(
            Peer(DECODE, 1, 0), ONE, self.dst.regions, LocalEngine(), terms("local"), HOST, clock=lambda: self.now
        )
        self.receiver.introduce(PREFILL, [self.sender.address])
        self.mute = False  # the receiver: nothing of it runs
        self.told: dict[tuple[str, str, str], Observe] = {}
        self.poller = zmq.Poller()

    def start(self) -> LocalEngine:
        self.starts.append(self.now)
        self.gate.wait(10.0)
        if self.refusals:
            self.refusals -= 1
            raise EngineError("no port is free")
        return Stubborn(self.network)

    def note(self, side: str, observed: Any) -> None:
        for seen in observed:
            assert isinstance(seen, Observe), seen
            assert (side, seen.room, seen.topic) not in self.told
            self.told[side, seen.room, seen.topic] = seen

    def turn(self) -> None:
        self.sender.register(self.poller)
        self.receiver.register(self.poller)
        self.poller.poll(3)
        self.note(PREFILL, self.sender.on_readable() + self.sender.tick())
        if not self.mute:
            self.note(DECODE, self.receiver.on_readable() + self.receiver.tick())

    def pump(self, until: Callable[[], object], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, self.told
            self.turn()

    def advance(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            for _ in range(3):
                self.turn()

    def heard(self, side: str, room: str, topic: str) -> Observe | None:
        return self.told.get((side, room, topic))

    def begin(self, room: str, page: int) -> None:
        """Up to the point where its write is submitted."""
        self.note(PREFILL, self.sender.open(room, DECODE, 0, 4))
        self.note(DECODE, self.receiver.open(room, PREFILL, 1, 4))
        self.pump(lambda: self.heard(DECODE, room, "prealloc"))
        self.note(DECODE, self.receiver.send_destinations(room, [page]))
        self.pump(lambda: self.heard(PREFILL, room, "bootstrap"))
        self.note(PREFILL, self.sender.start(room, [page]))
        self.note(PREFILL, self.sender.first_token(room, b"t"))
        self.write(room)

    def write(self, room: str) -> None:
        self.note(PREFILL, self.sender.written(room, 0, 4, LAYERS))

    def land(self) -> None:
        self.network.land(0)

    def finish(self, room: str, page: int) -> None:
        self.pump(lambda: self.heard(DECODE, room, "transfer") and self.heard(PREFILL, room, "transfer"))
        assert self.told[DECODE, room, "transfer"].good and self.told[PREFILL, room, "transfer"].good
        assert (self.dst.data[:, :, page] == self.src.data[:, :, page]).all()

    def cut(self, room: str) -> None:
        """Its only handle ends badly, and what is left of it may still land."""
        self.begin(room, 1)
        self.network.fail(len(self.network.flights) - 1, "cut")
        self.pump(lambda: self.heard(DECODE, room, "transfer"))
        assert self.heard(PREFILL, room, "release") is None and self.sender.side.unproven() > 0

    @property
    def replacements(self) -> int:
        return self.sender.slot.replacements


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.gate.set()
    for port in (made.sender, made.receiver):
        port.close_port()


def test_a_late_completion_saves_the_engine(pair: Pair) -> None:
    pair.cut("a/0")
    pair.advance(1.5)
    pair.land()
    pair.pump(lambda: pair.heard(DECODE, "a/0", "release") and pair.heard(PREFILL, "a/0", "release"))
    pair.advance(5.0)
    assert (pair.starts, pair.replacements, pair.sender.side.unproven()) == ([], 0, 0)


def test_the_replaced_engine_releases_our_pages_at_once_and_theirs_after_the_tail(pair: Pair) -> None:
    pair.cut("a/0")
    pair.advance(2.0)
    pair.pump(lambda: pair.heard(PREFILL, "a/0", "release"))
    assert pair.replacements == 1 and pair.network.flights == []
    assert (pair.sender.side.unproven(), pair.sender.side.trailing()) == (0, 1)
    pair.begin("b/0", 2)
    pair.land()
    pair.finish("b/0", 2)
    pair.advance(19.0)
    assert pair.heard(DECODE, "a/0", "release") is None and pair.receiver.side.unfenced() == 1
    pair.advance(3.0)
    assert pair.heard(DECODE, "a/0", "release") == Observe("a/0", "release", True)
    assert (pair.sender.side.trailing(), pair.replacements) == (0, 1)
    counters = pair.sender.counters()
    assert (counters.handles_submitted, counters.handles_done, counters.bytes_done) == (2, 1, FOUR)


def test_a_receiver_that_is_frozen_over_the_tail_is_fenced_only_after_it_thaws(pair: Pair) -> None:
    pair.cut("a/0")
    pair.advance(2.0)
    pair.pump(lambda: pair.heard(PREFILL, "a/0", "release"))
    pair.mute = True
    pair.advance(40.0)
    assert pair.sender.side.trailing() == 1, "its kernel may hold what it was sent"
    pair.mute = False
    pair.turn()
    assert pair.sender.side.trailing() == 1
    pair.advance(3.0)
    assert pair.heard(DECODE, "a/0", "release") == Observe("a/0", "release", True)


def test_healthy_writes_of_the_old_engine_end_while_the_new_one_serves(pair: Pair) -> None:
    pair.cut("a/0")
    pair.begin("b/0", 2)
    pair.advance(2.0)
    pair.pump(lambda: pair.replacements)
    pair.advance(3.0)
    assert pair.heard(PREFILL, "a/0", "release") is None, "the old engine waits for the healthy write"
    pair.begin("c/0", 3)
    assert len({flight.engine for flight in pair.network.flights}) == 2
    pair.network.land(2)
    pair.finish("c/0", 3)
    pair.network.land(1)
    pair.finish("b/0", 2)
    pair.pump(lambda: pair.heard(PREFILL, "a/0", "release"))


def test_a_write_that_fails_or_does_not_end_during_the_drain_shares_its_engines_fate(pair: Pair) -> None:
    pair.cut("a/0")
    pair.begin("b/0", 2)
    pair.begin("c/0", 3)
    pair.advance(2.0)
    pair.pump(lambda: pair.replacements)
    pair.network.fail(1, "cut in the drain")
    pair.advance(4.0)
    assert pair.heard(PREFILL, "b/0", "transfer") is not None and pair.heard(PREFILL, "b/0", "release") is None
    assert pair.heard(PREFILL, "c/0", "transfer") is None
    pair.advance(1.5)
    pair.pump(lambda: all(pair.heard(PREFILL, room, "release") for room in ("a/0", "b/0", "c/0")))
    assert "engine was replaced" in pair.told[PREFILL, "c/0", "transfer"].reason
    pair.advance(22.0)
    assert all(pair.heard(DECODE, room, "release") for room in ("a/0", "b/0", "c/0"))
    assert pair.replacements == 1


def test_a_second_failure_during_the_tail_gets_its_own_replacement_and_tail(pair: Pair) -> None:
    pair.cut("a/0")
    pair.advance(2.0)
    pair.pump(lambda: pair.heard(PREFILL, "a/0", "release"))
    pair.advance(10.0)
    pair.cut("b/0")
    pair.advance(2.0)
    pair.pump(lambda: pair.heard(PREFILL, "b/0", "release"))
    assert pair.replacements == 2
    pair.advance(11.0)
    assert pair.heard(DECODE, "a/0", "release") and not pair.heard(DECODE, "b/0", "release")
    pair.advance(11.0)
    assert pair.heard(DECODE, "b/0", "release")


def test_a_peer_that_breaks_every_write_replaces_the_engine_ever_less_often(pair: Pair) -> None:
    for number in range(12):
        pair.cut(f"{number}/0")
        pair.advance(2.5)
    gaps = [later - earlier for earlier, later in zip(pair.starts, pair.starts[1:], strict=False)]
    assert len(pair.starts) <= 6 and gaps == sorted(gaps) and gaps[-1] >= 8, pair.starts
    pair.advance(20.0)
    assert pair.sender.side.unproven() == 0, "all of them were released in the end"


def test_an_engine_that_cannot_start_beside_the_old_one_gets_its_place_at_last(pair: Pair) -> None:
    pair.refusals = 3
    pair.cut("a/0")
    pair.advance(2.0)
    pair.pump(lambda: len(pair.starts) == 1)
    pair.begin("b/0", 2)
    pair.network.land(1)
    pair.finish("b/0", 2)  # on the old engine, which goes on
    assert pair.sender.slot.engine is not None
    pair.advance(1.0)
    pair.pump(lambda: len(pair.starts) == 2)
    assert pair.heard(PREFILL, "a/0", "release") is None
    pair.advance(2.0)
    pair.pump(lambda: pair.heard(PREFILL, "a/0", "release"))
    pair.advance(1.5)  # the backoff after the second start
    pair.pump(lambda: pair.sender.slot.reason)
    pair.begin("c/0", 3)
    pair.pump(lambda: pair.heard(PREFILL, "c/0", "transfer"))
    assert "does not start: no port is free" in pair.told[PREFILL, "c/0", "transfer"].reason
    pair.pump(lambda: pair.heard(DECODE, "c/0", "release"))
    pair.advance(5.0)
    pair.pump(lambda: pair.replacements == 1)
    pair.begin("d/0", 4)
    pair.land()
    pair.finish("d/0", 4)
    assert pair.starts == sorted(pair.starts) and len(pair.starts) == 4


def test_writes_wait_for_an_engine_and_no_longer_than_they_may(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_port, "HELD", 3)
    pair.refusals = 2
    pair.cut("a/0")
    pair.advance(3.5)
    pair.pump(lambda: len(pair.starts) == 2 and not pair.sender.slot._busy)
    pair.gate.clear()
    pair.advance(2.0)
    pair.pump(lambda: pair.heard(PREFILL, "a/0", "release"))
    assert pair.sender.slot.engine is None
    for number, room in enumerate(("b/0", "c/0", "d/0", "e/0")):
        pair.begin(room, number + 2)
    assert pair.sender.held == 3
    assert "too many writes wait" in pair.told[PREFILL, "e/0", "transfer"].reason
    pair.note(DECODE, pair.receiver.stop("c/0", "abort"))
    pair.pump(lambda: pair.heard(DECODE, "c/0", "release"))
    assert pair.sender.held == 2, "a stopped room waits for no engine"
    pair.note(PREFILL, pair.sender.peer_lost("nobody", 1, "another one", dead=True))
    pair.advance(2.0)
    pair.gate.set()
    pair.pump(lambda: len(pair.network.flights) == 2)
    pair.land()
    pair.land()
    pair.finish("b/0", 2)
    pair.finish("d/0", 4)


def test_a_write_that_waited_too_long_fails_its_room_and_is_no_danger(pair: Pair) -> None:
    pair.refusals = 2
    pair.cut("a/0")
    pair.advance(3.5)
    pair.pump(lambda: len(pair.starts) == 2 and not pair.sender.slot._busy)
    pair.gate.clear()
    pair.advance(2.0)
    pair.pump(lambda: pair.heard(PREFILL, "a/0", "release"))
    pair.begin("b/0", 2)
    pair.advance(15.5)
    assert "no transfer engine reached" in pair.told[PREFILL, "b/0", "transfer"].reason
    pair.pump(lambda: pair.heard(DECODE, "b/0", "release") and pair.heard(PREFILL, "b/0", "release"))


def test_a_new_engine_never_writes_to_a_peer_that_has_not_spoken_since(pair: Pair) -> None:
    pair.cut("a/0")
    pair.note(PREFILL, pair.sender.open("b/0", DECODE, 0, 4))
    pair.note(DECODE, pair.receiver.open("b/0", PREFILL, 1, 4))
    pair.note(DECODE, pair.receiver.send_destinations("b/0", [2]))
    pair.pump(lambda: pair.heard(PREFILL, "b/0", "bootstrap"))
    pair.note(PREFILL, pair.sender.start("b/0", [2]))
    pair.mute = True
    pair.advance(2.0)
    pair.pump(lambda: pair.heard(PREFILL, "a/0", "release"))
    pair.write("b/0")
    pair.advance(1.0)
    assert pair.sender.held == 1 and pair.network.flights == []
    pair.mute = False
    pair.pump(lambda: pair.network.flights)
    pair.land()
    pair.note(PREFILL, pair.sender.first_token("b/0", b"t"))
    pair.finish("b/0", 2)


def test_an_engine_that_does_not_close_proves_nothing_and_the_new_one_serves(pair: Pair) -> None:
    old = pair.sender.engine
    assert isinstance(old, Stubborn)
    old.closable = False
    pair.cut("a/0")
    pair.advance(2.0)
    pair.pump(lambda: pair.replacements)
    pair.advance(30.0)
    assert pair.heard(PREFILL, "a/0", "release") is None
    pair.begin("b/0", 2)
    pair.network.land(1)
    pair.finish("b/0", 2)
    old.closable = True
    pair.pump(lambda: pair.heard(PREFILL, "a/0", "release"))


def test_a_port_that_closes_while_an_engine_starts_leaves_none_behind(pair: Pair) -> None:
    pair.gate.clear()
    pair.cut("a/0")
    pair.advance(2.0)
    pair.pump(lambda: pair.starts)
    threading.Timer(0.05, pair.gate.set).start()
    pair.sender.slot.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "transfer-replacement"]
    pair.sender.slot.close = lambda: None  # type: ignore[method-assign]
