"""The sockets of the peer link: a decode rank dials one prefill rank.

In: messages to send, bytes from the peer. Out: well-formed frames of a bound link, in
order and without repeats. Nothing here decides anything or blocks, and no thread is ours:
the rank's loop polls the sockets.

A link is one connection attempt: a fresh socket, a fresh number, counted frames. A frame
that is missing, a lost connection or silence ends it, and a new one starts with `Hello`;
both sides then say again what counts. So ZeroMQ's own reconnecting, which loses messages
without a word, is off. Malformed, oversized and unbound frames are dropped and counted.

With the cluster's secrets the connection is encrypted, and nobody without them gets a frame in.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from dataclasses import dataclass, field

import zmq

from security.gatekeeper import Gatekeeper, guard, present
from security.secrets import Secrets

from ..actions import Peer
from ..liveness import Liveness
from ..messages import MAX_FRAME, Frame, FrameError, Hello, Message, Reset, Welcome, decode, encode

HIGH_WATER = 4096
OUTBOX = 16384
PEERS = 4096
PING_INTERVAL = 2.0
BATCH = 1024  # frames taken per wake-up: a flood must not starve the loop


@dataclass(slots=True)
class LinkCounters:
    malformed: int = 0
    unbound: int = 0  # of a link that is not (any more) bound
    repeated: int = 0
    gaps: int = 0
    refused: int = 0  # a Hello
    unsent: int = 0  # dropped for a full outbox or a link that is down
    received: int = 0
    sent: int = 0


def _options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME)  # beyond this ZeroMQ cuts the connection
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 8000)


@dataclass(slots=True)
class _Binding:
    peer: Peer
    route: bytes
    link: int
    liveness: Liveness
    expected: int = 1
    number: int = 0
    broken: bool = False
    outbox: deque[bytes] = field(default_factory=deque)


class LinkServer:
    """The prefill rank's end: one ROUTER for all decode ranks."""

    def __init__(self, bind: str, identity: Peer, timeout: float, secrets: Secrets | None = None) -> None:
        self.identity = identity
        self.counters = LinkCounters()
        self.bindings: dict[Peer, _Binding] = {}
        self._routes: dict[bytes, _Binding] = {}
        self._timeout = timeout
        # A context of its own: the gatekeeper answers for this socket and no other.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gatekeeper = Gatekeeper(self._context, [secrets.curve_public]) if secrets else None
        self.socket = self._context.socket(zmq.ROUTER)
        _options(self.socket)
        if secrets is not None:
            guard(self.socket, secrets.curve_secret)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone is an error, not a silent drop
        self.socket.bind(bind)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, now: float) -> list[tuple[bytes, Frame]]:
        """(route, frame): a `Hello` of anyone, else only what continues a bound link."""
        if self.gatekeeper is not None:
            self.gatekeeper.answer()
        arrived = []
        for _ in range(BATCH):  # the rest is still there at the next poll
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) != 2:
                self.counters.malformed += 1
                continue
            try:
                frame = decode(parts[1])
            except FrameError:
                self.counters.malformed += 1
                continue
            if isinstance(frame.body, Hello) or self._continues(parts[0], frame, now):
                self.counters.received += 1
                arrived.append((parts[0], frame))
        for binding in self.bindings.values():
            self._drain(binding)
        return arrived

    @property
    def refused(self) -> int:
        """Connections of strangers."""
        return self.gatekeeper.refused if self.gatekeeper is not None else 0

    @property
    def full(self) -> bool:
        return len(self.bindings) >= PEERS

    def accept(self, route: bytes, frame: Frame, now: float, welcome: Welcome) -> bool:
        """Bind a link to the peer that said Hello; a former link of the same peer ends."""
        peer = Peer(frame.instance, frame.epoch, frame.rank)
        if peer not in self.bindings and self.full:
            return False
        self.forget(peer)
        if (former := self._routes.get(route)) is not None:
            self.forget(former.peer)
        binding = _Binding(peer, route, frame.link, Liveness(min(PING_INTERVAL, self._timeout / 4), self._timeout, now))
        self.bindings[peer] = self._routes[route] = binding
        self.send(peer, welcome)
        return True

    def answer(self, route: bytes, frame: Frame, message: Message) -> None:
        """One message to a peer that is not bound."""
        self._put(route, encode(self._frame(frame.link, 0, message)))

    def send(self, peer: Peer, message: Message) -> None:
        binding = self.bindings.get(peer)
        if binding is None or binding.broken:
            self.counters.unsent += 1
            return
        data = encode(self._frame(binding.link, binding.number, message))
        binding.number += 1
        binding.outbox.append(data)
        self._drain(binding)
        if len(binding.outbox) > OUTBOX:
            self._break(binding)

    def forget(self, peer: Peer) -> None:
        binding = self.bindings.pop(peer, None)
        if binding is not None:
            self._routes.pop(binding.route, None)

    def close(self) -> None:
        self.socket.close(0)
        if self.gatekeeper is not None:
            self.gatekeeper.close()
        self._context.term()

    def _frame(self, link: int, number: int, message: Message) -> Frame:
        return Frame(self.identity.instance, self.identity.epoch, self.identity.rank, link, number, message)

    def _continues(self, route: bytes, frame: Frame, now: float) -> bool:
        binding = self._routes.get(route)
        sender = Peer(frame.instance, frame.epoch, frame.rank)
        if binding is None or binding.broken or (binding.peer, binding.link) != (sender, frame.link):
            self.counters.unbound += 1
            self.answer(route, frame, Reset())
            return False
        if frame.number < binding.expected:
            self.counters.repeated += 1
            return False
        if frame.number > binding.expected:
            self.counters.gaps += 1
            self._break(binding)
            self.answer(route, frame, Reset())
            return False
        binding.expected += 1
        binding.liveness.heard(now)
        return True

    def _break(self, binding: _Binding) -> None:
        """Until it dials anew. The binding stays, so that its silence is noticed."""
        binding.broken = True
        self.counters.unsent += len(binding.outbox)
        binding.outbox.clear()

    def _drain(self, binding: _Binding) -> None:
        while binding.outbox:
            sent = self._put(binding.route, binding.outbox[0])
            if sent is None:
                return
            if not sent:
                self._break(binding)
                return
            binding.outbox.popleft()
            self.counters.sent += 1

    def _put(self, route: bytes, data: bytes) -> bool | None:
        """True: taken; None: full for now; False: the connection is gone."""
        try:
            self.socket.send_multipart([route, data], zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError:
            return False
        return True


class LinkClient:
    """The decode rank's end: one DEALER to one prefill rank, dialled anew as often as needed."""

    def __init__(
        self,
        address: str,
        rank: int,
        identity: Peer,
        context: zmq.Context[zmq.Socket[bytes]],
        timeout: float,
        now: float,
        counters: LinkCounters,
        secrets: Secrets | None = None,
    ) -> None:
        self.address, self.rank, self.identity = address, rank, identity
        self.counters = counters
        self.liveness = Liveness(min(PING_INTERVAL, timeout / 4), timeout, now)
        self.peer: Peer | None = None  # who welcomed us on this link
        self.down = True  # no link, or one that ended: dial
        self.lost = False  # its silence was reported already
        self.dialled_at = float("-inf")
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self._context, self._secrets = context, secrets
        self._link = self._number = self._expected = 0
        self._outbox: deque[bytes] = deque()

    def dial(self, hello: Hello, now: float) -> None:
        self.hang_up()
        self.socket = self._context.socket(zmq.DEALER)
        _options(self.socket)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if (known := self._secrets) is not None:
            present(self.socket, known.curve_public, known.curve_secret, known.curve_public)
        with contextlib.suppress(zmq.ZMQError):
            self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.down, self.dialled_at = False, now
        self._link, self._number, self._expected = secrets.randbits(62), 0, 0
        try:
            self.socket.connect(self.address)
        except zmq.ZMQError:  # not an address
            self.down = True
            return
        self.send(hello)

    def hang_up(self) -> None:
        if self.socket is not None:
            if self.monitor is not None:
                self.socket.disable_monitor()
                self.monitor.close(0)
            self.socket.close(0)
        self.socket = self.monitor = self.peer = None
        self.down = True
        self.counters.unsent += len(self._outbox)
        self._outbox.clear()

    def send(self, message: Message) -> None:
        if self.down or self.socket is None or (self.peer is None and not isinstance(message, Hello)):
            self.counters.unsent += 1
            return
        me = self.identity
        self._outbox.append(encode(Frame(me.instance, me.epoch, me.rank, self._link, self._number, message)))
        self._number += 1
        self._drain()
        if len(self._outbox) > OUTBOX:
            self.down = True

    def receive(self, now: float) -> list[Frame]:
        """Frames of this link in order. A gap, a `Reset` or a lost connection ends it: see `down`."""
        arrived: list[Frame] = []
        for _ in range(BATCH):
            if self.socket is None or self.down:
                break
            try:
                frame = decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            except FrameError:
                self.counters.malformed += 1
                continue
            if frame.link != self._link or frame.rank != self.rank:
                self.counters.unbound += 1
            elif isinstance(frame.body, Reset):
                self.down = True
            elif frame.number < self._expected:
                self.counters.repeated += 1
            elif frame.number > self._expected:
                self.counters.gaps += 1
                self.down = True
            elif self.peer is not None and self.peer != Peer(frame.instance, frame.epoch, frame.rank):
                self.counters.unbound += 1
                self.down = True
            else:
                self._expected += 1
                self.counters.received += 1
                self.liveness.heard(now)
                if isinstance(frame.body, Welcome):
                    self.peer = Peer(frame.instance, frame.epoch, frame.rank)
                arrived.append(frame)
        self._drain()
        if self.monitor is not None and self.monitor.poll(0):  # it only ever says one thing
            self.monitor.recv_multipart(zmq.NOBLOCK)
            self.down = True
        return arrived

    def _drain(self) -> None:
        while self._outbox and self.socket is not None:
            try:
                self.socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError:
                self.down = True
                return
            self._outbox.popleft()
            self.counters.sent += 1
