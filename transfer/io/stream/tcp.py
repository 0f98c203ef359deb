"""The sending half of a `stream` engine over TCP: writes of local memory to one peer.

In: transfers. Out: their ends, by the peer's verdicts; or one word that the path broke.

Invariants: frames are sent one after another and whole, without waiting for verdicts in between; a
transfer ends only when no byte of it will be read from its source any more; `close` resets the connection,
so that little of what the kernel still holds is sent after it, and the target's lease is what counts.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

import numpy

from .iovec import Iovec, address_of
from .loop import READABLE, WRITABLE, Alarm, Loop
from .receiver import keep_alive
from .transfer import LENGTH, SOURCE, TARGET, Broken, Ended, Transfer
from .wire import (
    BY_SOURCE,
    BY_TARGET,
    CHALLENGE,
    CHALLENGED,
    FRAME_BYTES,
    FULL,
    HEAD,
    HELLO,
    MAGIC,
    MAX_TAIL,
    NONCE_BYTES,
    OTHER_INCARNATION,
    OTHER_VERSION,
    VERSION,
    WELCOME,
    WELCOMED,
    Endpoint,
    Malformed,
    prove,
    take_verdicts,
    write_frame,
)

CONNECT_DEADLINE = 5.0  # until the peer has welcomed us
LOCAL_BUFFER = 1 << 18  # bytes: within one host they are then still in the cache when they are copied out
BUDGET = 8 << 20  # bytes sent before others have their turn
REFUSALS = {
    OTHER_VERSION: "the peer speaks another version of the stream protocol",
    OTHER_INCARNATION: "another engine listens at the peer's port: it was restarted",
    FULL: "the peer takes no more connections",
}


class TcpPath:
    def __init__(self, loop: Loop, endpoint: Endpoint, key: bytes | None, ended: Ended, broken: Broken) -> None:
        self.ready = False
        self._loop, self._endpoint, self._key = loop, endpoint, key
        self._hello = b""
        self._proven = False  # the peer knows our key, or there is none
        self._ended, self._broken = ended, broken
        self._deadline = Alarm(loop, lambda: self._break("the peer's port does not answer"))
        self._socket: socket.socket | None = None
        self._fd = -1
        self._connected = False
        self._queue: deque[Transfer] = deque()  # nothing of them was sent
        self._current: Transfer | None = None  # whose frame is being sent
        self._frame: Iovec | None = None
        self._sequence = 0
        self._sequences: dict[int, Transfer] = {}  # begun, without a verdict
        self._head = bytearray(HEAD.size + MAX_TAIL)
        self._head_address = address_of(self._head)
        self._in = bytearray()
        self._watched = 0

    def open(self) -> None:
        address = (self._endpoint.host, self._endpoint.port)
        family = socket.AF_INET6 if ipaddress.ip_address(self._endpoint.host).version == 6 else socket.AF_INET
        self._socket = connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._fd = connection.fileno()
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 2)
            keep_alive(connection)
            code = connection.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError:
            connection.close()
            self._socket = None
            raise
        self._watched = WRITABLE
        self._loop.watch(self._fd, WRITABLE, self)
        self._deadline.set(time.monotonic() + CONNECT_DEADLINE)

    def send(self, transfer: Transfer) -> None:
        self._queue.append(transfer)
        if self.ready and self._frame is None:
            self._attempt(self._pump)

    def close(self) -> None:
        self._deadline.off()
        if self._socket is not None:
            self._loop.unwatch(self._fd)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.close()
            self._socket = None

    def on_ready(self, events: int) -> None:
        self._attempt(lambda: self._advance(events))

    def abandon(self, reason: str) -> None:
        self._break(reason)

    # ---- inside

    def _attempt(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Malformed as error:
            self._break(str(error))
        except OSError as error:
            self._break(f"the connection to the peer failed: {error.strerror or error}")

    def _break(self, reason: str, final: bool = False) -> None:
        if self._socket is not None:
            self.close()
            self._broken(reason, final)

    def _advance(self, events: int) -> None:
        assert self._socket is not None
        if not self._connected:
            if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            self._connected = True
            if self._socket.getsockname()[0] == self._socket.getpeername()[0]:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER)
            meant, nonce = bytes.fromhex(self._endpoint.incarnation), secrets.token_bytes(NONCE_BYTES)
            self._hello = HELLO.pack(MAGIC, VERSION, meant, nonce)
            self._socket.sendall(self._hello)
            self._watch(READABLE)
            return
        if events & ~WRITABLE:
            self._hear()
        if self._socket is not None and events & WRITABLE:
            self._pump()

    def _hear(self) -> None:
        assert self._socket is not None
        try:
            heard = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not heard:
            self._break("the peer closed the connection")
            return
        self._in += heard
        if not self.ready and not self._welcome():
            return
        for sequence, refusal in take_verdicts(self._in):
            self._judge(sequence, refusal)
        if self._frame is None:
            self._pump()

    def _welcome(self) -> bool:
        if len(self._in) < WELCOME.size:
            return False
        magic, version, answer = WELCOME.unpack_from(self._in)
        if (magic, version, answer) == (MAGIC, VERSION, CHALLENGED) and not self._proven:
            return self._prove() and self._welcome()
        if answer == WELCOMED and self._key is not None and not self._proven:
            self._break("the peer does not ask for the cluster's secrets, so it may be anyone", final=True)
            return False
        if answer != WELCOMED or magic != MAGIC or version != VERSION:
            known = magic == MAGIC and answer in REFUSALS
            reason = REFUSALS[answer] if known else "what listens at the peer's port is no stream engine"
            self._break(reason, final=answer != FULL)
            return False
        del self._in[: WELCOME.size]
        self.ready = True
        self._deadline.off()
        return True

    def _prove(self) -> bool:
        """Whether the challenge is whole, the peer's own proof is right, and ours is on its way."""
        assert self._socket is not None
        if len(self._in) < WELCOME.size + CHALLENGE.size:
            return False
        nonce, proof = CHALLENGE.unpack_from(self._in, WELCOME.size)
        del self._in[: WELCOME.size + CHALLENGE.size]
        if self._key is None:
            self._break("the peer asks for the cluster's secrets, and there are none here", final=True)
            return False
        if not hmac.compare_digest(proof, prove(self._key, BY_TARGET, self._hello, nonce)):
            self._break("the peer has other secrets than this cluster's", final=True)
            return False
        self._proven = True
        self._socket.sendall(prove(self._key, BY_SOURCE, self._hello, nonce))
        return True

    def _judge(self, sequence: int, refusal: str | None) -> None:
        transfer = self._sequences.pop(sequence, None)
        if transfer is None or (refusal is None and (transfer is self._current or not transfer.whole)):
            raise Malformed("the peer judged what was not sent")
        if transfer is self._current and self._frame is not None:  # which must be sent to the end
            transfer.refused = refusal
            return
        if transfer is self._current:
            self._current = None
        self._ended(transfer, refusal)

    def _pump(self) -> None:
        budget = BUDGET
        while budget > 0 and (self._frame is not None or self._next_frame()):
            assert self._frame is not None
            sent = self._frame.send(self._fd)
            if sent is None:
                break
            budget -= sent
            if self._frame.remaining == 0:
                self._frame = None
                self._after_frame()
        idle = self._current is None and not self._queue
        self._watch(READABLE if idle else READABLE | WRITABLE)

    def _next_frame(self) -> bool:
        if self._current is None:
            if not self._queue:
                return False
            self._current = self._queue.popleft()
            self._sequence += 1
            self._sequences[self._sequence] = self._current
        transfer = self._current
        pieces = transfer.cut(FRAME_BYTES)
        size = write_frame(self._head, transfer.whole, transfer.lease, self._sequence, pieces[:, TARGET:])
        ranges = numpy.empty((len(pieces) + 1, 2), dtype=numpy.uint64)
        ranges[0] = self._head_address, size
        ranges[1:, 0], ranges[1:, 1] = pieces[:, SOURCE], pieces[:, LENGTH]
        self._frame = Iovec(ranges)
        return True

    def _after_frame(self) -> None:
        transfer = self._current
        assert transfer is not None
        if transfer.refused is not None:
            self._current = None
            self._ended(transfer, transfer.refused)
        elif transfer.whole:
            self._current = None

    def _watch(self, events: int) -> None:
        if self._socket is not None and events != self._watched:
            self._watched = events
            self._loop.change(self._fd, events)
