"""The driver's bookkeeping against a library that does what the real one was seen to do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from transfer.io import mooncake
from transfer.io.engine import Completion
from transfer.io.mooncake import PIECE, WINDOW, MooncakeDriver


class Library:
    """Ids are answered once with a terminal status; afterwards the answer is garbage."""

    def __init__(self) -> None:
        self.ids: Iterator[int] = iter(range(1000, 10000))
        self.status: dict[int, int] = {}
        self.most = 0
        self.refuse = False
        self.asked: list[str] = []
        self.wait: Callable[[str], None] = lambda session: None

    def transfer_submit_write(self, session: str, src: int, dst: int, nbytes: int) -> int:
        assert nbytes <= PIECE
        self.asked.append(session)
        self.wait(session)
        if self.refuse:
            return 0
        identifier = next(self.ids)
        self.status[identifier] = 0
        self.most = max(self.most, len(self.status))
        return identifier

    def transfer_check_status(self, identifier: int) -> int:
        status = self.status[identifier]  # a KeyError: it was asked again after its end
        if status != 0:
            del self.status[identifier]
        return status

    def end(self, status: int, count: int | None = None) -> None:
        for identifier in list(self.status)[:count]:
            self.status[identifier] = status


def driver(deadline: float = 60.0) -> tuple[MooncakeDriver, Library]:
    library = Library()
    made = MooncakeDriver("127.0.0.1", "", deadline)
    made._engine = library
    made.connect("b", b"mooncake/1 127.0.0.1:15000")
    return made, library


def test_a_large_write_goes_in_pieces_and_no_more_than_the_window_at_once() -> None:
    made, library = driver()
    assert made.begin(1, "b", [(0, 0, 200 * PIECE + 5)]) == []
    ended: list[Completion] = []
    while made.outstanding():
        ended += made.advance()
        library.end(1)
    assert ended == [Completion(1)] and library.most == WINDOW
    assert made.counters.bytes_done == 200 * PIECE + 5 and made.counters.writes_done == 201


def test_after_a_failed_piece_no_other_is_submitted_and_the_end_waits_for_those_in_flight() -> None:
    made, library = driver()
    made.begin(1, "b", [(0, 0, 100 * PIECE)])
    made.begin(2, "b", [(0, 0, PIECE)])
    assert made.advance() == []
    library.end(-1, 1)
    assert made.advance() == [], "63 pieces are still in flight"
    library.end(1)
    ended = made.advance()
    assert [(e.handle, e.error is None, e.quiet) for e in ended] == [(1, False, False), (2, True, False)]
    assert made.counters.writes_done == 64 and not made.outstanding()


def test_a_piece_past_its_deadline_is_unknown_and_told_again_when_it_ends() -> None:
    made, library = driver(deadline=-1.0)
    made.begin(1, "b", [(0, 0, 2 * PIECE)])
    made.advance()
    (unknown,) = made.advance()
    assert unknown.error is not None and not unknown.quiet and made.outstanding()
    (refused,) = made.begin(2, "b", [(0, 0, 8)])
    assert refused.quiet and "unknown fate" in str(refused.error)
    library.end(1)
    assert made.advance() == [Completion(1)], "the truth after all"
    assert made.begin(3, "b", [(0, 0, 8)]) == []


def test_an_unknown_handle_whose_rest_was_given_up_ends_quiet_but_not_well() -> None:
    made, library = driver(deadline=-1.0)
    made.begin(1, "b", [(0, 0, 100 * PIECE)])
    made.advance()
    made.advance()
    library.end(1)
    (ended,) = made.advance()
    assert ended.error is not None and ended.quiet, "what was submitted has ended well, the rest never started"


def test_a_refused_write_is_quiet_only_before_the_first_contact() -> None:
    made, library = driver()
    library.refuse = True
    made.begin(1, "b", [(0, 0, 3 * PIECE)])
    assert [e.quiet for e in made.advance()] == [True]
    library.refuse = False
    made.begin(2, "b", [(0, 0, 8)])
    made.advance()
    library.end(1)
    assert made.advance() == [Completion(2)]
    library.refuse = True
    made.begin(3, "b", [(0, 0, 8)])
    assert [e.quiet for e in made.advance()] == [False]


def test_a_dropped_peer_gets_nothing_more_and_comes_back_by_connect() -> None:
    made, library = driver()
    made.begin(1, "b", [(0, 0, 100 * PIECE)])
    made.advance()
    made.drop("b")
    library.end(1)
    assert [(e.error is None, e.quiet) for e in made.advance()] == [(False, True)]
    assert not made.outstanding()
    assert made.begin(2, "b", [(0, 0, 8)])[0].quiet
    made.connect("b", b"mooncake/1 127.0.0.1:15000")
    assert made.begin(3, "b", [(0, 0, 8)]) == []


def test_an_endpoint_that_is_none_connects_nobody() -> None:
    made, _ = driver()
    for endpoint in (b"", b"\xff", b"mooncake/1 ", b"mooncake/1 host:99999", b"mooncake/1 a b:1", b"nixl"):
        made.connect("x", endpoint)
        assert made.begin(1, "x", [(0, 0, 8)])[0].quiet


def test_only_tcp_connections_to_the_port_are_cut() -> None:
    """A process also has other sockets open: unnamed ones whose address is not a pair, and strangers'."""
    left, right = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, left, right:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller:
            accepted, _ = server.accept()
            assert mooncake._cut_connections(port)
            assert caller.recv(1) == b"", "cut"
            accepted.close()
        left.sendall(b"x")
        assert right.recv(1) == b"x", "not ours to cut"
        assert not mooncake._cut_connections(port)


def test_a_mute_peer_holds_the_library_once_and_then_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    def wait(session: str) -> None:
        nonlocal now
        if session.endswith(":1"):
            now += 61.0  # as long as the real library was seen to sit in its first contact

    monkeypatch.setattr("transfer.io.mooncake.time.monotonic", lambda: now)
    made, library = driver()
    library.wait = wait
    made.connect("mute", b"mooncake/1 127.0.0.1:1")
    library.refuse = True
    for handle in (1, 2, 3):
        made.begin(handle, "mute", [(0, 0, 4 * PIECE)])
    ended = made.advance()
    assert [(e.handle, e.quiet) for e in ended] == [(1, True), (2, True), (3, True)]
    assert ended[1].error == ended[2].error == mooncake.MUTE
    assert library.asked == ["127.0.0.1:1"], "one contact for all that was queued"
    assert made.begin(4, "mute", [(0, 0, 8)]) == [Completion(4, mooncake.MUTE, quiet=True)]
    library.refuse = False
    made.begin(5, "b", [(0, 0, 8)])
    made.advance()
    library.end(1)
    assert made.advance() == [Completion(5)], "others go on"
    now += mooncake.FIRST_PAUSE
    library.refuse = True
    made.begin(6, "mute", [(0, 0, 8)])
    made.advance()
    assert library.asked.count("127.0.0.1:1") == 2, "it is tried again"
    now += mooncake.FIRST_PAUSE
    assert made.begin(7, "mute", [(0, 0, 8)])[0].error == mooncake.MUTE, "and then later"
    now += mooncake.FIRST_PAUSE
    library.refuse, library.wait = False, lambda session: None
    assert made.begin(8, "mute", [(0, 0, 8)]) == []
    made.advance()
    library.end(1)
    assert made.advance() == [Completion(8)], "a peer that has recovered is as good as any"
