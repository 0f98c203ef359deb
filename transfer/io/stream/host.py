"""The talk about shared memory between `stream` engines on one host, and the target's end of it.

In, at the target: regions that lie in shared memory, leases as they stand, questions for them.
Out: the descriptors of that memory and of the table of leases; per question the lease's slot, nonce and areas.

The socket is a Unix one with an abstract name, so it is reached from the same network namespace only. It
has no permissions, so both ends check that the other one is of the same user before they take a byte of it,
and the greeting names the incarnation. Descriptors are taken only by the end that expects some. A peer that
passed is trusted to keep to the areas and to the table of leases, as it could write to this process's memory
in other ways too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence

import numpy

from .areas import Lease
from .fence import LeaseTable
from .loop import READABLE, WRITABLE, Alarm, Loop
from .wire import HELLO, MAGIC, MAX_LEASE, VERSION, Malformed

LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<HHI16s")  # bytes of the lease, granted, slot, nonce; then the lease, then the areas
MAX_MESSAGE = 8 << 20  # of an answer: its areas
LONGEST_QUESTION = max(HELLO.size, MAX_LEASE)
MAX_REGIONS = 200  # descriptors in one message: the kernel takes 253
CONNECTIONS = 256
HELLO_DEADLINE = 5.0
FENCE_PAUSE, LONGEST_FENCE_PAUSE = 0.001, 0.020  # a copy takes less than the first


class MessageSocket:
    """Messages with their length before them, and descriptors that come along. Never blocks."""

    def __init__(self, connection: socket.socket, longest: int, descriptors: int = 0) -> None:
        """`longest`: of the other end's messages, in bytes. `descriptors`: how many it may send, in all."""
        connection.setblocking(False)
        self._longest, self._most_descriptors = longest, descriptors
        self.connection, self.fd = connection, connection.fileno()
        self.descriptors: list[int] = []  # received; the holder closes them
        self.unsent = bytearray()
        self._in = bytearray()

    def same_user(self) -> bool:
        credentials = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.unpack("3i", credentials)[1] == os.geteuid()

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """What does not fit now stays in `unsent`. Raises `OSError`."""
        framed = LENGTH.pack(len(message)) + message
        if descriptors:
            framed = framed[socket.send_fds(self.connection, [framed], list(descriptors)) :]
        self.unsent += framed
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent, socket.MSG_NOSIGNAL)]

    def receive(self) -> list[bytes] | None:
        """The complete messages there are; None at the end. Raises `OSError`, or `Malformed`."""
        try:
            heard, descriptors = self._take()
        except BlockingIOError:
            return []
        self.descriptors += descriptors
        if len(self.descriptors) > self._most_descriptors:
            raise Malformed("too many descriptors")
        if not heard:
            return None
        self._in += heard
        messages, at = [], 0
        while len(self._in) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._in, at)
            if length > self._longest:
                raise Malformed(f"a message of {length} bytes")
            end = at + LENGTH.size + length
            if len(self._in) < end:
                break
            messages.append(bytes(self._in[at + LENGTH.size : end]))
            at = end
        del self._in[:at]
        return messages

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        self.connection.close()

    def _take(self) -> tuple[bytes, list[int]]:
        if not self._most_descriptors:  # without room for them the kernel drops those that come
            return self.connection.recv(1 << 18), []
        flags = socket.MSG_CMSG_CLOEXEC
        heard, descriptors, _, _ = socket.recv_fds(self.connection, 1 << 18, self._most_descriptors, flags)
        return heard, descriptors


class MemoryHost:
    """The target's end, all of it on the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        name: str,
        incarnation: bytes,
        leases: Mapping[bytes, Lease],
        regions: Sequence[tuple[int, int, int]],
    ) -> None:
        """`regions`: address, bytes, descriptor. Raises `OSError`."""
        self.loop, self.incarnation, self.leases, self.regions = loop, incarnation, leases, regions
        self.table = LeaseTable()
        self.connections: set[HostConnection] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{name}")
        self._listener.listen(64)
        loop.watch(self._listener.fileno(), READABLE, self)

    def on_ready(self, events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                self.abandon("no descriptor for another connection")  # peers go on by TCP
            return
        messages = MessageSocket(connection, LONGEST_QUESTION)
        if len(self.connections) < CONNECTIONS and messages.same_user():
            HostConnection(self, messages)
        else:
            messages.close()

    def abandon(self, reason: str) -> None:
        self.loop.unwatch(self._listener.fileno())
        self._listener.close()

    def admit(self, lease: Lease) -> bool:
        """False: the table is full."""
        if lease.slot is None and (admitted := self.table.admit()) is not None:
            lease.slot, lease.nonce = admitted
        return lease.slot is not None

    def fence(self, lease: Lease, done: Callable[[], None]) -> None:
        """`done` follows once no copy under the lease, which nobody can find any more, is under way."""
        if lease.slot is None:
            done()
        else:
            self.table.revoke(lease.slot)
            _Fence(self, lease.slot, done).look()

    def close(self) -> None:
        """No copy begins any more; `quiet` says when none is under way."""
        self.table.revoke_all()
        for connection in list(self.connections):
            connection.close()
        self.abandon("closed")

    def quiet(self) -> bool:
        return self.table.quiet()

    def release(self) -> None:
        self.table.close()


class _Fence:
    """Of one slot: asks for its lock until it is free, ever less often, for a stopped sender may hold it for long."""

    def __init__(self, host: MemoryHost, slot: int, done: Callable[[], None]) -> None:
        self._host, self._slot, self._done = host, slot, done
        self._pause = FENCE_PAUSE
        self._again = Alarm(host.loop, self.look)

    def look(self) -> None:
        if self._host.table.fence(self._slot):
            self._done()
        else:
            self._again.set(time.monotonic() + self._pause)
            self._pause = min(1.5 * self._pause, LONGEST_FENCE_PAUSE)


class HostConnection:
    def __init__(self, host: MemoryHost, messages: MessageSocket) -> None:
        self._host, self._messages = host, messages
        self._greeted = False
        self._events = READABLE
        self._deadline = Alarm(host.loop, self.close)
        self._deadline.set(time.monotonic() + HELLO_DEADLINE)
        host.connections.add(self)
        host.loop.watch(self._messages.fd, READABLE, self)

    def on_ready(self, events: int) -> None:
        try:
            if events & WRITABLE:
                self._messages.flush()
            if events & ~WRITABLE:
                messages = self._messages.receive()
                if messages is None:
                    self.close()
                    return
                for message in messages:
                    self._answer(message)
        except (OSError, Malformed):
            self.close()
            return
        wanted = READABLE | WRITABLE if self._messages.unsent else READABLE
        if wanted != self._events:
            self._events = wanted
            self._host.loop.change(self._messages.fd, wanted)

    def abandon(self, reason: str) -> None:
        self.close()

    def close(self) -> None:
        if self in self._host.connections:
            self._host.connections.remove(self)
            self._deadline.off()
            self._host.loop.unwatch(self._messages.fd)
            self._messages.close()

    # ---- inside

    def _answer(self, message: bytes) -> None:
        if not self._greeted:
            self._greet(message)
            return
        if not message or len(self._messages.unsent) > 2 * MAX_MESSAGE:
            raise Malformed("no question for a lease")
        lease = self._host.leases.get(message)
        granted, areas = False, b""
        if lease is not None and 16 * len(lease.areas.starts) <= MAX_MESSAGE - 1024:
            granted = self._host.admit(lease)
            areas = lease.areas.pairs().astype("<u8").tobytes()
        slot, nonce = (lease.slot or 0, lease.nonce) if granted and lease is not None else (0, b"")
        self._messages.send(ANSWER.pack(len(message), granted, slot, nonce) + message + (areas if granted else b""))

    def _greet(self, message: bytes) -> None:
        host = self._host
        if len(message) != HELLO.size:
            raise Malformed("no greeting")
        magic, version, meant, _ = HELLO.unpack(message)
        if (magic, version, meant) != (MAGIC, VERSION, host.incarnation):
            raise Malformed("a greeting for another engine")
        self._greeted = True
        self._deadline.off()
        table = numpy.array([region[:2] for region in host.regions], dtype="<u8").tobytes()
        self._messages.send(table, [host.table.fd, *(descriptor for _, _, descriptor in host.regions)])
