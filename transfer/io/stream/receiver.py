"""The receiving half of a `stream` engine over TCP: peers' frames into leased memory.

In: connections, and leases as they stand. Out: bytes in exactly the leased areas, a verdict per handle.

Invariants: a byte lands only after the frame that carries it was checked against its lease; this thread is
the only one that writes, so once `divert(lease)` has returned nothing lands under that lease, whatever the
peer does: what its half received frame still brings goes to a scratch buffer that nobody reads. No length
of a peer is trusted, and each peer is bounded: greetings and frames have deadlines, connections a number,
verdicts that nobody reads a size.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy

from .areas import Lease
from .iovec import Iovec, Ranges, address_of, one_range
from .loop import READABLE, WRITABLE, Alarm, Loop
from .wire import (
    BY_SOURCE,
    BY_TARGET,
    CHALLENGE,
    CHALLENGED,
    FULL,
    HEAD,
    HELLO,
    MAGIC,
    MAX_TAIL,
    NONCE_BYTES,
    OTHER_INCARNATION,
    OTHER_VERSION,
    PROOF_BYTES,
    VERSION,
    WELCOME,
    WELCOMED,
    Head,
    Malformed,
    prove,
    read_head,
    read_tail,
    verdict,
)

log = logging.getLogger(__name__)

PEERS = 256
STRANGERS = 128  # connections that have not said yet whom they mean; one more ends the oldest
HELLO_DEADLINE = 5.0
FRAME_DEADLINE = 20.0  # from a frame's first byte to its last
UNREAD_VERDICTS = 1 << 20  # bytes
BUDGET = 8 << 20  # bytes of one connection before the others have their turn
ACCEPT_PAUSE = 1.0

_scratch = bytearray(1 << 16)  # written by whoever discards, read by nobody
_scratch_address = address_of(_scratch)


@dataclass(slots=True)
class ReceiverCounters:
    accepted: int = 0
    malformed: int = 0  # connections closed for what they said
    strangers: int = 0  # greetings that meant another incarnation or version, or that proved nothing
    silent: int = 0  # closed without a greeting
    stalled: int = 0  # closed in the middle of a frame, or for verdicts they do not read
    turned_away: int = 0  # for the number of connections
    frames: int = 0
    frames_refused: int = 0  # a handle's first one; the rest of it is not looked at
    bytes_landed: int = 0


class Receiver:
    def __init__(
        self, loop: Loop, host: str, incarnation: bytes, leases: Mapping[bytes, Lease], key: bytes | None = None
    ) -> None:
        """Listens on a free port of `host`, a numeric address; for who knows the `key`. Raises `OSError`."""
        self.key = key
        self.loop, self.incarnation, self.leases = loop, incarnation, leases
        self.counters = ReceiverCounters()
        self.connections: dict[int, Connection] = {}  # in order of their arrival
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._pause = Alarm(loop, lambda: loop.change(self._listener.fileno(), READABLE))

    def open(self) -> None:
        self.loop.watch(self._listener.fileno(), READABLE, self)

    def on_ready(self, events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors or memory; it would be ready again at once
            log.error("stream: cannot accept a connection: %s", error)
            self.loop.change(self._listener.fileno(), 0)
            self._pause.set(time.monotonic() + ACCEPT_PAUSE)
            return
        self.counters.accepted += 1
        waiting = [one for one in self.connections.values() if not one.greeted]
        if len(waiting) >= STRANGERS:
            self.counters.turned_away += 1
            waiting[0].close()
        try:
            Connection(self, connection)
        except OSError as error:
            log.error("stream: cannot serve a connection: %s", error)
            connection.close()

    def abandon(self, reason: str) -> None:
        self.loop.unwatch(self._listener.fileno())
        self._listener.close()

    def divert(self, lease: Lease) -> None:
        """Returns when no byte lands under it any more."""
        for connection in list(self.connections.values()):
            connection.divert(lease)

    def close(self) -> None:
        for connection in list(self.connections.values()):
            connection.close()
        self.abandon("closed")
        self._pause.off()


class Connection:
    """Of one peer. Always about to fill some ranges of memory, then to look at them."""

    def __init__(self, receiver: Receiver, connection: socket.socket) -> None:
        self._receiver, self._socket, self._fd = receiver, connection, connection.fileno()
        self._counters = receiver.counters
        self.greeted = self._closed = False
        self._buffer = bytearray(MAX_TAIL)
        self._address = address_of(self._buffer)
        self._out = bytearray()
        self._watching_out = False
        self._head: Head | None = None
        self._lease: Lease | None = None  # whose memory is being filled
        self._sequence = -1
        self._refused = self._complete = True  # what became of that handle
        self._then: Callable[[], None]
        self._expect(one_range(self._address, HELLO.size), self._on_hello)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        self._deadline = Alarm(receiver.loop, self._late)
        receiver.loop.watch(self._fd, READABLE, self)
        receiver.connections[self._fd] = self
        self._deadline.set(time.monotonic() + HELLO_DEADLINE)

    def on_ready(self, events: int) -> None:
        try:
            if events & WRITABLE:
                self._flush()
            if events & ~WRITABLE:
                self._read()
        except Malformed as error:
            self._counters.malformed += 1
            log.debug("stream: closed a connection: %s", error)
            self.close()
        except OSError as error:
            log.debug("stream: lost a connection: %s", error)
            self.close()

    def abandon(self, reason: str) -> None:
        self.close()

    def divert(self, lease: Lease) -> None:
        if self._lease is lease:
            self._refuse("the lease was revoked")
            self._flush_guarded()

    def close(self) -> None:
        self._deadline.off()
        self._lease = None
        if not self._closed:
            self._closed = True
            del self._receiver.connections[self._fd]
            self._receiver.loop.unwatch(self._fd)
            self._socket.close()

    # ---- inside

    def _read(self) -> None:
        budget = BUDGET
        while budget > 0 and (got := self._iovec.receive(self._fd)) is not None:
            if got == 0:
                self.close()
                return
            budget -= got
            if self._lease is not None:
                self._counters.bytes_landed += got
            if self._iovec.remaining == 0:
                self._then()
                if self._closed:
                    return
        if self.greeted and not self._deadline.is_set and not self._between_frames():
            self._deadline.set(time.monotonic() + FRAME_DEADLINE)
        self._flush()

    def _between_frames(self) -> bool:
        return self._head is None and self._iovec.remaining == HEAD.size

    def _expect(self, ranges: Ranges, then: Callable[[], None]) -> None:
        self._iovec, self._then = Iovec(ranges), then

    def _expect_head(self) -> None:
        self._deadline.off()
        self._head = self._lease = None
        self._expect(one_range(self._address, HEAD.size), self._on_head)

    def _on_hello(self) -> None:
        magic, version, meant, _ = HELLO.unpack_from(self._buffer)
        if magic != MAGIC:
            raise Malformed("no greeting")
        answer = WELCOMED
        if version != VERSION:
            answer = OTHER_VERSION
        elif meant != self._receiver.incarnation:
            answer = OTHER_INCARNATION
        elif sum(one.greeted for one in self._receiver.connections.values()) >= PEERS:
            answer = FULL
        if answer == WELCOMED and self._receiver.key is not None:
            self._challenge(self._receiver.key)
            return
        self._out += WELCOME.pack(MAGIC, VERSION, answer)
        if answer != WELCOMED:
            self._counters.strangers += answer != FULL
            self._counters.turned_away += answer == FULL
            self._flush()
            self.close()
            return
        self.greeted = True
        self._expect_head()

    def _challenge(self, key: bytes) -> None:
        hello, nonce = bytes(self._buffer[: HELLO.size]), secrets.token_bytes(NONCE_BYTES)
        self._out += WELCOME.pack(MAGIC, VERSION, CHALLENGED)
        self._out += CHALLENGE.pack(nonce, prove(key, BY_TARGET, hello, nonce))
        expected = prove(key, BY_SOURCE, hello, nonce)

        def on_proof() -> None:
            if not hmac.compare_digest(bytes(self._buffer[:PROOF_BYTES]), expected):
                self._counters.strangers += 1
                raise Malformed("no proof of the cluster's secrets")
            self._out += WELCOME.pack(MAGIC, VERSION, WELCOMED)
            self.greeted = True
            self._expect_head()

        self._expect(one_range(self._address, PROOF_BYTES), on_proof)

    def _on_head(self) -> None:
        head = read_head(self._buffer)
        if head.sequence > self._sequence and (self._refused or self._complete):
            self._sequence, self._refused, self._complete = head.sequence, False, False
        elif head.sequence != self._sequence or self._complete:
            raise Malformed(f"a frame of handle {head.sequence} after handle {self._sequence}")
        self._head = head
        self._expect(one_range(self._address, head.tail), self._on_tail)

    def _on_tail(self) -> None:
        head = self._head
        assert head is not None
        name, table = read_tail(self._buffer, head)
        self._counters.frames += 1
        self._expect(table, self._on_payload)
        lease = self._receiver.leases.get(name)
        if self._refused:
            self._discard()
        elif lease is None:
            self._refuse("there is no such lease, or it was revoked")
        elif not lease.areas.cover(table[:, 0], table[:, 1]):
            self._refuse("a write leaves the areas of its lease")
        else:
            self._lease = lease

    def _on_payload(self) -> None:
        head = self._head
        assert head is not None
        self._complete = head.last
        if head.last and not self._refused:
            self._out += verdict(head.sequence, None)
        self._expect_head()

    def _refuse(self, reason: str) -> None:
        """The current frame, and with it its handle. Said at once, so that the peer need not send the rest."""
        self._counters.frames_refused += 1
        self._refused = True
        self._out += verdict(self._sequence, reason)
        self._discard()

    def _discard(self) -> None:
        self._lease = None
        whole, rest = divmod(self._iovec.remaining, len(_scratch))
        sizes = [len(_scratch)] * whole + [rest] * (rest > 0)
        self._expect(numpy.array([(_scratch_address, size) for size in sizes], dtype=numpy.uint64), self._on_payload)

    def _flush_guarded(self) -> None:
        """Outside of our own events: a broken connection will say so by itself."""
        try:
            self._flush()
        except OSError:
            pass

    def _flush(self) -> None:
        if self._out:
            try:
                del self._out[: self._socket.send(self._out, socket.MSG_NOSIGNAL)]
            except BlockingIOError:
                pass
        if bool(self._out) != self._watching_out and not self._closed:
            self._watching_out = bool(self._out)
            self._receiver.loop.change(self._fd, READABLE | WRITABLE if self._out else READABLE)
        if len(self._out) > UNREAD_VERDICTS:
            self._late()

    def _late(self) -> None:
        if self.greeted:
            self._counters.stalled += 1
        else:
            self._counters.silent += 1
        self.close()


def keep_alive(connection: socket.socket) -> None:
    """A peer whose host vanished is noticed: while data is on its way within 5 s, otherwise within half a minute."""
    for option, value in (
        (socket.TCP_KEEPIDLE, 15),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 5000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
