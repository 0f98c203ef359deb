"""The sending half of a `stream` engine on the target's own host: it copies into the target's memory itself.

In: transfers. Out: their ends; or one word that the path broke, which before `ready` means: use TCP.

Invariants: a piece is copied only into areas that the target named for the lease, while the table of leases
says that it stands; after each `COPY_BYTES` the loop looks at everything else, and a fence gets through. A
transfer is done when its last byte is copied: the memory is one, and whoever is told of it comes later.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import time
from collections import OrderedDict, deque

import numpy

from ..engine import Area
from .areas import Areas
from .fence import LeaseTableView, require_sealed
from .host import ANSWER, MAX_MESSAGE, MAX_REGIONS, MessageSocket
from .loop import READABLE, WRITABLE, Alarm, Loop
from .transfer import LENGTH, TARGET, Broken, Ended, Transfer
from .wire import HELLO, MAGIC, NONCE_BYTES, VERSION, Endpoint, Malformed

GREETING_DEADLINE = 2.0
KNOWN_LEASES = 1024
COPY_BYTES = 1 << 20
SMALL = 1 << 14  # bytes that are copied without letting go of Python's lock, which may take longer to get back

_copy_small = ctypes.PyDLL(None).memmove
_copy_small.argtypes, _copy_small.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p


class Mappings:
    """The target's regions in this process."""

    def __init__(self, regions: list[Area], descriptors: list[int]) -> None:
        """Raises `OSError` or `ValueError` for what cannot be mapped. The descriptors stay the caller's."""
        regions, descriptors = map(list, zip(*sorted(zip(regions, descriptors, strict=True)), strict=True))
        self._areas = Areas(regions, merged=False)
        if (self._areas.starts[1:] < self._areas.ends[:-1]).any():
            raise ValueError("the peer's regions overlap")
        self._maps: list[mmap.mmap] = []
        for (_, nbytes), descriptor in zip(regions, descriptors, strict=True):
            require_sealed(descriptor, nbytes)
            self._maps.append(mmap.mmap(descriptor, nbytes))
        here = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in self._maps]
        self._here = numpy.array(here, dtype=numpy.uint64)

    def translate(self, pieces: numpy.ndarray) -> bool:
        """Their target addresses become ours. False if one is in no region."""
        index = self._areas.locate(pieces[:, TARGET], pieces[:, LENGTH])
        if index is None:
            return False
        pieces[:, TARGET] += self._here[index] - self._areas.starts[index]  # wraps, and back
        return True

    def close(self) -> None:
        for one in self._maps:
            one.close()


class _Known:
    """What the target said of a lease."""

    def __init__(self, slot: int, nonce: bytes, areas: Areas) -> None:
        self.slot, self.nonce, self.areas = slot, nonce, areas


class MemoryPath:
    def __init__(self, loop: Loop, endpoint: Endpoint, ended: Ended, broken: Broken) -> None:
        self.ready = False
        self._loop, self._endpoint = loop, endpoint
        self._ended, self._broken = ended, broken
        self._messages: MessageSocket | None = None
        self._events = READABLE
        self._deadline = Alarm(loop, lambda: self._break("no answer"))
        self._table: LeaseTableView | None = None
        self._mappings: Mappings | None = None
        self._queue: deque[Transfer] = deque()
        self._known: OrderedDict[bytes, _Known | None] = OrderedDict()  # None: asked for
        self._working = False
        self._checked: Transfer | None = None  # the first of the queue, with addresses of this process

    def open(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(f"\0{self._endpoint.memory}")  # at once, or not at all
            messages = MessageSocket(connection, MAX_MESSAGE, 1 + MAX_REGIONS)
            if not messages.same_user():
                raise OSError(errno.EPERM, "it is another user's")
            messages.send(HELLO.pack(MAGIC, VERSION, bytes.fromhex(self._endpoint.incarnation), bytes(NONCE_BYTES)))
        except OSError:
            connection.close()
            raise
        self._messages = messages
        self._loop.watch(messages.fd, READABLE, self)
        self._deadline.set(time.monotonic() + GREETING_DEADLINE)

    def send(self, transfer: Transfer) -> None:
        self._queue.append(transfer)
        if self.ready:
            self._ask(transfer.lease)
            self._work()

    def close(self) -> None:
        """No copy is under way here: it is this thread that copies."""
        self._deadline.off()
        if self._messages is not None:
            self._loop.unwatch(self._messages.fd)
            self._messages.close()
            self._messages = None
        for one in (self._table, self._mappings):
            if one is not None:
                one.close()
        self._table = self._mappings = None
        self._queue.clear()

    def on_ready(self, events: int) -> None:
        try:
            self._advance(events)
        except (OSError, ValueError) as error:  # `Malformed` is one
            self._break(f"the connection to the peer failed: {error}")

    def abandon(self, reason: str) -> None:
        self._break(reason)

    # ---- inside

    def _break(self, reason: str) -> None:
        if self._messages is not None:
            self.close()
            self._broken(reason, False)

    def _advance(self, events: int) -> None:
        assert self._messages is not None
        if events & WRITABLE:
            self._messages.flush()
        if events & ~WRITABLE:
            messages = self._messages.receive()
            if messages is None:
                self._break("the peer closed the connection")
                return
            for message in messages:
                if self.ready:
                    self._learn(message)
                else:
                    self._enter(message)
        self._watch()
        self._work()

    def _enter(self, table: bytes) -> None:
        """The welcome: the regions, and the descriptors of the table of leases and of each region."""
        assert self._messages is not None
        count, rest = divmod(len(table), 16)
        descriptors = self._messages.descriptors
        if rest or not 1 <= count <= MAX_REGIONS or len(descriptors) != 1 + count:
            raise Malformed("no welcome")
        pairs = numpy.frombuffer(table, dtype="<u8").reshape(-1, 2).tolist()
        self._table = LeaseTableView(descriptors[0])
        self._mappings = Mappings([(address, nbytes) for address, nbytes in pairs], descriptors[1:])
        for descriptor in descriptors:  # mapped; the table was opened anew
            os.close(descriptor)
        descriptors.clear()
        self.ready = True
        self._deadline.off()
        for transfer in self._queue:
            self._ask(transfer.lease)

    def _ask(self, lease: bytes) -> None:
        if lease in self._known or self._messages is None:
            return
        self._known[lease] = None
        try:
            self._messages.send(lease)
        except OSError:
            pass  # its end is an event of its own
        self._watch()

    def _watch(self) -> None:
        if self._messages is not None:
            wanted = READABLE | WRITABLE if self._messages.unsent else READABLE
            if wanted != self._events:
                self._events = wanted
                self._loop.change(self._messages.fd, wanted)

    def _learn(self, answer: bytes) -> None:
        if len(answer) < ANSWER.size:
            raise Malformed("no answer")
        length, granted, slot, nonce = ANSWER.unpack_from(answer)
        lease, areas = answer[ANSWER.size : ANSWER.size + length], answer[ANSWER.size + length :]
        if self._known.get(lease, b"") is not None or len(areas) % 16:
            raise Malformed("no answer to what was asked")
        known = Areas(numpy.frombuffer(areas, dtype="<u8").reshape(-1, 2)) if granted else Areas(())
        self._known[lease] = _Known(slot, nonce if granted else b"", known)
        while len(self._known) > KNOWN_LEASES and next(iter(self._known.values())) is not None:
            self._known.popitem(last=False)

    def _work(self) -> None:
        if self._queue and not self._working and self._known.get(self._queue[0].lease) is not None:
            self._working = True
            self._loop.work(self._step)

    def _step(self) -> bool:
        """Some bytes of the first transfer. Whether there is more to do at once."""
        self._working = False
        if not self._queue:
            return False
        transfer = self._queue[0]
        known = self._known.get(transfer.lease)
        if known is None:
            self._ask(transfer.lease)  # forgotten meanwhile, or on its way
            return False
        error = self._refusal(transfer, known) or self._copy(transfer, known)
        if error is not None or transfer.whole:
            self._queue.popleft()
            self._checked = None
            if error is not None:
                self._known.pop(transfer.lease, None)  # the same name may be granted anew
            self._ended(transfer, error)
        self._working = bool(self._queue) and self._known.get(self._queue[0].lease) is not None
        if not self._working and self._queue:
            self._ask(self._queue[0].lease)
        return self._working

    def _refusal(self, transfer: Transfer, known: _Known) -> str | None:
        """Why it may not even begin."""
        if transfer is self._checked:
            return None
        pieces = transfer.pieces
        if not known.nonce:
            return "there is no such lease, or it was revoked"
        if not known.areas.cover(pieces[:, TARGET], pieces[:, LENGTH]):
            return "a write leaves the areas of its lease"
        assert self._mappings is not None
        if not self._mappings.translate(pieces):
            return "a write leaves the peer's shared memory"
        self._checked = transfer
        return None

    def _copy(self, transfer: Transfer, known: _Known) -> str | None:
        assert self._table is not None
        pieces = transfer.cut(COPY_BYTES).tolist()
        if not self._table.enter(known.slot, known.nonce):
            return "the lease was revoked"
        try:
            for source, target, nbytes in pieces:
                (_copy_small if nbytes <= SMALL else ctypes.memmove)(target, source, nbytes)
        finally:
            self._table.leave(known.slot)
        return None
