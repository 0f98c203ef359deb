"""The link between two ranks: what is not a frame is dropped, what is lost is said again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from security.folder import make
from security.gatekeeper import present
from tests.transfer.rig import DECODE, HOST, PREFILL, Rig, engine_for, terms
from transfer.actions import Observe, Peer
from transfer.handshake import objection
from transfer.io import link
from transfer.io.receiving_port import ReceivingPort
from transfer.io.sending_port import SendingPort
from transfer.messages import MAX_FRAME, Destinations, Finished, Frame, FrameError, Hello, Ping, Stop, decode, encode


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_decode_or_be_refused(data: bytes) -> None:
    try:
        assert isinstance(decode(data), Frame)
    except FrameError:
        pass


@given(st.data())
def test_a_damaged_frame_is_a_frame_or_refused(data: st.DataObject) -> None:
    good = bytearray(encode(Frame("d", 1, 0, 7, 3, Destinations("r/0", 9, (1, 2, 3)))))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(good))
    except FrameError:
        pass


def test_sizes_are_bounded() -> None:
    with pytest.raises(FrameError, match="over the bound"):
        decode(b"x" * (MAX_FRAME + 1))
    with pytest.raises(FrameError):
        decode(encode(Frame("d", 1, 0, 7, 3, Stop("r" * 257, ""))))


def hand_over(rig: Rig, room: str, page: int) -> None:
    rig.begin(room, 4, [page], [page])
    rig.prefill(room, 0, 4)
    rig.sample(room, b"t")
    rig.finish(room)
    assert all(o.good for o in rig.heard(DECODE, room, "transfer"))


def dealer(address: str) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.connect(address)
    return made


def test_malformed_frames_are_dropped_and_counted_and_the_link_goes_on() -> None:
    with Rig("local", 1, 1) as rig:
        hand_over(rig, "a/0", 1)
        counters = rig.senders[0].link.counters
        stranger = dealer(rig.senders[0].address)
        bad = [
            b"",
            b"\xc1",
            b"x" * 100,
            b"y" * (MAX_FRAME + 1),
            msgspec.msgpack.encode(["d", 1, 0, 7, 3, {"type": "No"}]),
        ]
        for data in bad:
            stranger.send(data)
        stranger.send_multipart([b"two", b"parts"])
        rig.pump(lambda: counters.malformed == len(bad) + 1)
        stranger.send(encode(Frame(DECODE, 1, 0, 7, 3, Stop("a/0", "not mine to stop"))))
        rig.pump(lambda: counters.unbound == 1)
        hand_over(rig, "b/0", 2)
        stranger.close()


def test_a_frame_beyond_what_zmq_takes_costs_its_sender_the_connection_and_nobody_else() -> None:
    with Rig("local", 1, 1) as rig:
        stranger = dealer(rig.senders[0].address)
        stranger.send(b"z" * (2 * MAX_FRAME + 1))
        hand_over(rig, "a/0", 1)
        stranger.close()


@pytest.mark.parametrize("who", ["plain", "other cluster", "server key known"])
def test_with_secrets_a_stranger_gets_no_frame_in(who: str, tmp_path: Path) -> None:
    ours, theirs = make(tmp_path / "ours"), make(tmp_path / "theirs")
    with Rig("local", 1, 1, peer_timeout=1.0, secrets=ours) as rig:
        hand_over(rig, "a/0", 1)
        link = rig.senders[0].link
        before = replace(link.counters)
        socket = dealer(rig.senders[0].address) if who == "plain" else zmq.Context.instance().socket(zmq.DEALER)
        if who != "plain":
            socket.setsockopt(zmq.LINGER, 0)
            server = ours.curve_public if who == "server key known" else theirs.curve_public
            present(socket, theirs.curve_public, theirs.curve_secret, server)
            socket.connect(rig.senders[0].address)
        forged = Hello(PREFILL, terms("local"), rig.destination, rig.dst[0].regions, b"", HOST)
        for _ in range(100):
            socket.send(encode(Frame(DECODE, 99, 0, 7, 0, forged)))
        if who == "server key known":
            rig.pump(lambda: link.refused > 0)
        hand_over(rig, "b/0", 2)
        assert socket.poll(0) == 0
        assert link.counters.malformed == before.malformed == 0
        assert [peer.epoch for peer in link.bindings] == [1]
        socket.close()


def test_a_receiver_with_other_secrets_hands_nothing_to_an_impostor(tmp_path: Path) -> None:
    ours, theirs = make(tmp_path / "ours"), make(tmp_path / "theirs")
    with Rig("local", 1, 1, peer_timeout=0.5, secrets=ours) as rig:
        rig.secrets = theirs
        stranger = rig.receiver(0, rig.dst[0])
        rig.receivers[0].close_port()
        rig.receivers[0] = stranger
        stranger.introduce(PREFILL, [rig.senders[0].address])
        rig.note(DECODE, 0, stranger.open("a/0", PREFILL, 1, 4))
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "prealloc"))
        assert "no word from" in rig.heard(DECODE, "a/0", "prealloc")[0].reason
        assert not rig.senders[0].link.bindings


def test_without_secrets_a_forged_incarnation_does_not_displace_the_one_that_the_log_names() -> None:
    with Rig("local", 1, 1) as rig:
        sender, stranger = rig.senders[0], dealer(rig.senders[0].address)
        rig.note(PREFILL, 0, sender.open("named/0", DECODE, 1, 4))
        hand_over(rig, "a/0", 1)
        forged = Hello(PREFILL, terms("local"), rig.destination, rig.dst[0].regions, b"x", HOST)
        stranger.send(encode(Frame(DECODE, 1 << 61, 0, 7, 0, forged)))
        rig.pump(lambda: Peer(DECODE, 1 << 61, 0) in sender.link.bindings)
        hand_over(rig, "b/0", 2)
        rig.receivers[0]._sources[PREFILL].links[0].hang_up()
        hand_over(rig, "c/0", 3)
        assert not rig.heard(PREFILL, "named/0", "bootstrap")
        stranger.close()


def test_an_incarnation_counts_once_the_log_names_it() -> None:
    with Rig("local", 1, 1) as rig:
        sender = rig.senders[0]
        rig.note(PREFILL, 0, sender.open("old/0", DECODE, 1, 4))
        hand_over(rig, "a/0", 1)
        rig.receivers[0].close_port()
        rig.receivers[0] = rig.receiver(0, rig.dst[0], epoch=2)
        rig.receivers[0].introduce(PREFILL, [sender.address])
        rig.note(DECODE, 0, rig.receivers[0].open("new/0", PREFILL, 1, 4))
        rig.pump(lambda: rig.all_heard(DECODE, "new/0", "prealloc"))
        rig.note(DECODE, 0, rig.receivers[0].send_destinations("new/0", [2]))
        assert not rig.heard(PREFILL, "old/0", "bootstrap")
        rig.note(PREFILL, 0, sender.open("new/0", DECODE, 2, 4))
        rig.pump(lambda: rig.all_heard(PREFILL, "new/0", "bootstrap"))
        assert "restarted as epoch 2" in rig.heard(PREFILL, "old/0", "bootstrap")[0].reason


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_frame_is_noticed_and_its_meaning_said_again(times: int) -> None:
    with Rig("local", 2, 2, peer_timeout=30.0) as rig:
        hand_over(rig, "a/0", 1)
        for time in range(times):
            link = rig.receivers[0]._sources[PREFILL].links[0]
            link._number += 1  # as if ZeroMQ had lost one
            link.dialled_at = float("-inf")
            hand_over(rig, f"b{time}/0", 2 + time)
        assert rig.senders[0].link.counters.gaps == times


def test_a_broken_connection_is_dialled_anew_and_the_room_goes_on() -> None:
    with Rig("local", 1, 1, peer_timeout=30.0) as rig:
        rig.begin("a/0", 8, [0, 1], [2, 3])
        rig.receivers[0]._sources[PREFILL].links[0].hang_up()
        rig.prefill("a/0", 0, 8)
        rig.sample("a/0", b"t")
        rig.finish("a/0")
        assert rig.heard(DECODE, "a/0", "transfer")[0].payload == b"t"
        assert rig.heard(PREFILL, "a/0", "transfer")[0].good


def test_silence_of_a_decode_rank_ends_its_rooms_on_the_prefill_side() -> None:
    with Rig("local", 1, 1, peer_timeout=1.0) as rig:
        rig.begin("a/0", 8, [0, 1], [2, 3])
        rig.receivers, (receiver,) = [], rig.receivers
        rig.pump(lambda: rig.all_heard(PREFILL, "a/0", "transfer"))
        assert not rig.heard(PREFILL, "a/0", "transfer")[0].good
        assert rig.heard(PREFILL, "a/0", "release")[0].good, "nothing was in flight"
        rig.receivers = [receiver]
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "release"))
        hand_over(rig, "b/0", 5)


def test_a_prefill_that_restarted_is_another_incarnation() -> None:
    with Rig("local", 1, 1, peer_timeout=30.0) as rig:
        rig.begin("a/0", 8, [0, 1], [2, 3])
        old = rig.senders[0]
        old.close_port()
        rig.senders = [
            SendingPort(
                Peer(PREFILL, 2, 0),
                rig.source,
                rig.src[0].regions,
                engine_for("local", rig.src[0]),
                terms("local"),
                HOST,
            )
        ]
        rig.note(DECODE, 0, rig.receivers[0].introduce(PREFILL, [rig.senders[0].address]))
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "transfer"))
        assert "elsewhere" in rig.heard(DECODE, "a/0", "transfer")[0].reason
        assert rig.heard(DECODE, "a/0", "release") == []
        hand_over(rig, "b/0", 5)
        assert rig.heard(DECODE, "a/0", "release") == [], "the new one cannot speak for the old one"
        rig.note(DECODE, 0, rig.receivers[0].peer_dead(PREFILL, 1, "reaped"))
        assert rig.heard(DECODE, "a/0", "release")[0].good
        hand_over(rig, "c/0", 6)


def test_those_who_do_not_fit_are_refused_and_their_rooms_told_why() -> None:
    with Rig("local", 1, 1) as rig:
        port = ReceivingPort(
            Peer(DECODE, 1, 0),
            rig.destination,
            rig.dst[0].regions,
            engine_for("local", rig.dst[0]),
            msgspec.structs.replace(terms("local"), model="other"),
            HOST,
        )
        rig.receivers = [port]
        port.introduce(PREFILL, [rig.senders[0].address])
        rig.note(DECODE, 0, port.open("a/0", PREFILL, 0, 4))
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "prealloc"))
        refused = rig.heard(DECODE, "a/0", "prealloc")[0]
        assert not refused.good and refused.reason == "model: 'm' here, 'other' there"


def hello(rig: Rig) -> Hello:
    return Hello(PREFILL, terms("local"), rig.destination, rig.dst[0].regions, b"", HOST)


def test_the_handshake_names_both_values() -> None:
    with Rig("local", 1, 1) as rig:
        good = hello(rig)
        mine = terms("local")
        assert objection(good, 0, mine, rig.source, HOST) is None
        other_host = msgspec.structs.replace(good, host="10.1.2.3")
        assert "127.0.0.1 here, 10.1.2.3 there" in (objection(other_host, 0, mine, rig.source, HOST) or "")
        backend = msgspec.structs.replace(good, terms=terms("nixl"))
        assert objection(backend, 0, mine, rig.source, HOST) == "backend: 'local' here, 'nixl' there"
        narrow = msgspec.structs.replace(good, regions=replace(rig.dst[0].regions, bytes_per_token=(16,) * 6))
        assert "16 bytes" not in str(objection(good, 0, mine, rig.source, HOST))
        assert "regions of" in (objection(narrow, 0, mine, rig.source, HOST) or "")
        pages = msgspec.structs.replace(good, topology=replace(rig.destination, page_size=8))
        assert "page size: 4 at the source, 8 at the destination" in (objection(pages, 0, mine, rig.source, HOST) or "")


def test_a_page_outside_the_pool_is_never_submitted() -> None:
    with Rig("local", 1, 1) as rig:
        rig.begin("a/0", 4, [0], [31 + 1])
        rig.prefill("a/0", 0, 4)
        rig.pump(lambda: rig.all_heard(PREFILL, "a/0", "transfer") and rig.all_heard(DECODE, "a/0", "release"))
        failed = rig.heard(PREFILL, "a/0", "transfer")[0]
        assert not failed.good and "leave the destination" in failed.reason
        assert rig.senders[0].engine.counters.bytes_submitted == 0


def test_an_unknown_peer_is_asked_for_and_one_that_never_answers_is_given_up() -> None:
    with Rig("local", 1, 1, peer_timeout=0.5) as rig:
        (need,) = rig.receivers[0].open("a/0", "stranger", 3, 4)
        assert (need.instance, need.epoch) == ("stranger", 3)  # type: ignore[union-attr]
        rig.receivers[0].introduce("stranger", ["tcp://127.0.0.1:9"])
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "prealloc"))
        assert not rig.heard(DECODE, "a/0", "prealloc")[0].good


def test_messages_of_another_incarnation_are_dropped_and_counted() -> None:
    with Rig("local", 1, 1) as rig:
        rig.begin("a/0", 4, [0], [1])
        side = rig.receivers[0].side
        stale = side.on_message(Peer(PREFILL, 7, 0), Finished("a/0", 4, (0, 6), 4 * 6 * 64, 1, b"t"))
        assert stale == [] and side.counters.foreign == 1
        assert not any(isinstance(action, Observe) for action in side.on_message(Peer(PREFILL, 1, 0), Stop("a/0", "")))
        assert side.counters.unexpected == 1
        assert isinstance(decode(encode(Frame("d", 1, 0, 7, 3, Ping()))).body, Ping)


def test_a_full_link_gives_up_who_came_first_and_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PEERS", 3)
    with Rig("local", 1, 1) as rig:
        port = rig.senders[0]

        def greet(name: str, epoch: int = 1) -> Peer:
            frame = Frame(name, epoch, 0, 1, 0, hello(rig))
            port._on_hello(name.encode(), frame, Peer(name, epoch, 0), hello(rig), 0.0)
            return Peer(name, epoch, 0)

        first, second, third = greet("a"), greet("b"), greet("c")
        port.open("r/0", "a", 1, 4)
        fourth = greet("d")
        assert list(port.link.bindings) == [first, third, fourth], "a is awaited, b came next"
        for number in range(50):
            greet(f"x{number}")
        assert first in port.link.bindings and len(port.link.bindings) == len(port._peers) == 3
        assert second not in port._peers
