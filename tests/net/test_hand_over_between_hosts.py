"""KV between hosts over a network that is slow, loses frames, is cut, heals or does not heal.

A hand-over that is under way when the network fails may end either way, but it ends on both sides, with a
reason if badly, and within bounds gives back every page. The next one between the same processes works.
"""

from __future__ import annotations

import time

import pytest

from decode.io.port import TAIL
from tests.net.conftest import Stage
from tests.net.prefill_process import BOOTSTRAP_PORT, LIMITS
from tests.net.ranks import STAGE_TIMEOUT, Cast, RankProcess
from tests.net.switch import Path

pytestmark = pytest.mark.net

SLOW = Path(delay=0.01, rate=20e6)  # so that what is cut in mid transfer is in mid transfer
LOSSY = Path(delay=0.01, loss=0.01)
MANY = 48  # pages, of 1 MiB: seconds at that rate
CUT = 5.0  # seconds

# By which a hand-over has ended and its pages are back, after its network has healed: the silence of a peer
# or the log's deadline, then an engine replaced (twice: the second one may meet what is left of the cut), the
# tail of its sockets, and a word of the peer.
BOUND = STAGE_TIMEOUT + 2 * (LIMITS.replace_after + LIMITS.drain + LIMITS.backoff) + LIMITS.tail + 15.0


def test_kv_arrives_whole_over_a_slow_and_lossy_network(stage: Stage) -> None:
    cast = stage(LOSSY, "prefill", "decode")
    prefill, decode = cast.prefill(), cast.decode()
    for number in range(4):
        cast.deliver(prefill, decode, f"one/{number}", pages=6)
    cast.begin(prefill, decode, "two/0", range(8), range(8, 16))
    cast.begin(prefill, decode, "two/1", range(20, 28), range(8))
    for room in ("two/0", "two/1"):
        assert cast.conclude(prefill, decode, room, 60.0) and prefill.good(room, "transfer"), cast.story()
    cast.nothing_left(prefill, decode)
    assert prefill.status["replacements"] == 0


def in_mid_transfer(cast: Cast, prefill: RankProcess, decode: RankProcess, room: str) -> None:
    cast.begin(prefill, decode, room, range(MANY), range(4, 4 + MANY))
    cast.wait(lambda: decode.status["landed"].get(room, 0) > 0)
    assert not decode.told(room, "transfer") and decode.status["landed"][room] < MANY


def works_again(cast: Cast, prefill: RankProcess, decode: RankProcess) -> None:
    cast.deliver(prefill, decode, "next/0", pages=8)
    cast.deliver(prefill, decode, "next/1", pages=8)
    cast.nothing_left(prefill, decode, seconds=BOUND)


def test_a_cut_in_mid_transfer_that_heals(stage: Stage) -> None:
    cast = stage(SLOW, "prefill", "decode")
    prefill, decode = cast.prefill(), cast.decode()
    cast.deliver(prefill, decode, "warm/0", pages=2)
    in_mid_transfer(cast, prefill, decode, "a/0")
    cast.lab.cut("prefill", "decode")
    cast.idle(CUT)
    cast.lab.heal("prefill", "decode")
    cast.conclude(prefill, decode, "a/0", BOUND)
    works_again(cast, prefill, decode)


@pytest.mark.parametrize("warm", [True, False], ids=["known", "unknown"])
def test_a_cut_before_the_transfer_that_heals(stage: Stage, warm: bool) -> None:
    cast = stage(SLOW, "prefill", "decode")
    prefill, decode = cast.prefill(), cast.decode()
    if warm:
        cast.deliver(prefill, decode, "warm/0", pages=2)
    cast.lab.cut("prefill", "decode")
    cast.begin(prefill, decode, "a/0", range(8), range(8))
    cast.idle(CUT)
    cast.lab.heal("prefill", "decode")
    cast.conclude(prefill, decode, "a/0", BOUND)
    works_again(cast, prefill, decode)


@pytest.mark.parametrize("silent", ["prefill", "decode"])
def test_one_side_is_not_heard_for_a_while(stage: Stage, silent: str) -> None:
    cast = stage(SLOW, "prefill", "decode")
    prefill, decode = cast.prefill(), cast.decode()
    cast.deliver(prefill, decode, "warm/0", pages=2)
    in_mid_transfer(cast, prefill, decode, "a/0")
    cast.lab.cut(silent, "decode" if silent == "prefill" else "prefill", both=False)
    cast.idle(CUT)
    cast.lab.heal("prefill", "decode")
    cast.conclude(prefill, decode, "a/0", BOUND)
    works_again(cast, prefill, decode)


def test_a_cut_for_good_costs_only_the_two_that_it_parts(stage: Stage) -> None:
    cast = stage(SLOW, "prefill", "decode", "healthy", "successor")
    prefill, decode, healthy = cast.prefill(), cast.decode(), cast.decode("healthy")
    cast.deliver(prefill, decode, "warm/0", pages=2)
    cast.deliver(prefill, healthy, "warm/1", pages=2)
    in_mid_transfer(cast, prefill, decode, "a/0")
    cast.lab.cut("prefill", "decode")
    cut = time.monotonic()

    # The others are served meanwhile, until the cut one has its pages back and is forgotten.
    number, closed = 0, False
    while not closed or "a/0" in prefill.status["rooms"]:
        beside(cast, prefill, healthy, f"b/{number}")
        cast.idle(0.2)
        number += 1
        if prefill.released("a/0") and not closed:
            prefill.say("close", "a/0")
            closed = True
        assert time.monotonic() - cut < BOUND + LIMITS.give_up, cast.story()
    cast.wait(lambda: decode.over("a/0"))
    for rank in (prefill, decode):
        assert rank.seen["a/0", "transfer"].reason and not rank.good("a/0", "transfer")
    cast.nothing_left(prefill, healthy)
    assert prefill.status["slowest"] < 5.0, "the control loop waited for the network"

    # What the cut prefill rank may still have on its way is over when its process is dead, and its sockets are.
    leased = cast.backend == "stream"
    assert (prefill.status["replacements"] == 0) == leased, "only an engine whose writes cannot be fenced is replaced"
    cast.wait(lambda: decode.released("a/0") == leased and decode.status["unfenced"] == (0 if leased else 1))
    decode.say("close", "a/0")
    prefill.reap()
    successor = cast.prefill("successor", epoch=2)
    cast.begin(successor, decode, "c/0", range(4), range(4 + MANY, 8 + MANY))  # of a/0 it has all others
    assert cast.conclude(successor, decode, "c/0", BOUND), cast.story()
    cast.deliver(successor, healthy, "c/1", pages=4)
    cast.nothing_left(successor, decode, healthy, seconds=TAIL + 10.0)


def beside(cast: Cast, prefill: RankProcess, healthy: RankProcess, room: str) -> None:
    """While source pages of the cut room are still in use."""
    cast.begin(prefill, healthy, room, range(MANY, MANY + 4), range(4))
    assert cast.conclude(prefill, healthy, room, 30.0) and prefill.good(room, "transfer"), cast.story()


def test_decode_is_there_long_before_prefill_can_be_found(stage: Stage) -> None:
    cast = stage(SLOW, "prefill", "decode")
    decode = cast.decode()
    address = f"prefill-0.prefill:{BOOTSTRAP_PORT}"  # a name that nobody knows yet
    decode.say("open", "early/0", address, 0, list(range(4)))
    cast.wait(lambda: decode.released("early/0"))
    assert "prefill-0.prefill" in decode.seen["early/0", "prealloc"].reason
    decode.say("close", "early/0")

    decode.say("open", "a/0", address, 0, list(range(4)))
    prefill = cast.prefill()
    prefill.say("open", "a/0", "decode", list(range(4)))
    cast.lab.name("decode", {"prefill-0.prefill": prefill.address})
    if not cast.conclude(prefill, decode, "a/0", 60.0):  # it may have been asked for too early
        cast.deliver(prefill, decode, "a/1", pages=4)
    cast.deliver(prefill, decode, "b/0", pages=4)
    cast.nothing_left(prefill, decode)
