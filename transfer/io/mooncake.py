"""Mooncake's TransferEngine over TCP (or RDMA, untested), driven from the owned thread.

In: lists of writes. Out: completions, one per handle. Facts that shape this file:
the library ignores its protocol argument, so TCP is forced by its environment, before
the import, and the choice is verified; a batch id reports only its first descriptor, so
each piece (at most 1 MiB) is its own id, asked for exactly until it is terminal, since a
freed id answers garbage; more than about 2000 outstanding pieces per peer fail, so 64 are;
a peer that accepts but never answers holds up the whole library for a minute, so a rank
connects only to peers it has just talked to. Nothing can be cancelled: a piece past its
deadline is *unknown*, reported as an error, and still asked for until it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..regions import Write
from .engine import Completion, EngineCounters, EngineError

PIECE = 1 << 20
WINDOW = 64
PREFIX = b"mooncake/1 "
MUTE = "the peer's transfer port accepts and does not answer"
SLOW_REFUSAL = 2.0  # seconds; a refused connection is known at once
FIRST_PAUSE, LAST_PAUSE = 10.0, 600.0

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",
}


@dataclass(slots=True)
class _Handle:
    number: int
    pieces: int
    queued: int  # pieces not submitted yet
    in_flight: int = 0
    done: int = 0
    started: bool = False
    failed: str | None = None  # a piece ended badly: where its bytes are is anyone's guess
    given_up: str | None = None  # no piece failed, but the rest is not submitted
    unknown: bool = False  # already reported, while pieces of it were in flight


@dataclass(slots=True)
class _Peer:
    session: str
    dropped: bool = False
    reached: bool = False  # the library took a write to it, once
    mute_until: float = 0.0  # its port took our first contact and said nothing: not asked again before
    pause: float = 0.0
    queue: deque[tuple[_Handle, int, int, int]] = field(default_factory=deque)
    flying: dict[int, tuple[_Handle, int, float]] = field(default_factory=dict)  # id -> handle, bytes, deadline


class MooncakeDriver:
    name = "mooncake"

    def __init__(self, host: str, device: str, handle_deadline: float) -> None:
        self.counters = EngineCounters()
        self._host, self._device = host, device
        self._deadline = handle_deadline
        self._peers: dict[str, _Peer] = {}
        self._engine: Any = None
        self._session = ""

    def open(self) -> None:
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        # The choice is made by what devices are found; each of these makes the other one fail.
        os.environ.pop("MC_FORCE_TCP", None)
        os.environ["MC_FORCE_HCA" if self._device else "MC_FORCE_TCP"] = "1"
        os.environ.pop("MC_LOG_DIR", None)  # the library aborts the process over it
        try:
            library = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise EngineError(
                f"cannot load Mooncake ({error}); it needs the Python package mooncake-transfer-engine-non-cuda "
                "and the Debian packages libibverbs1 libnuma1 libcurl4"
            ) from error
        before = _listeners()
        self._engine = library.TransferEngine()
        protocol = "rdma" if self._device else "tcp"
        if self._engine.initialize(self._host, "P2PHANDSHAKE", protocol, self._device) != 0:
            raise EngineError(f"Mooncake did not start on {self._host} {self._device}")
        opened = _listeners() - before
        if not self._device and len(opened) == 1:  # TCP has a data port beside the one for metadata, RDMA has not
            raise EngineError("Mooncake was told to use TCP and chose another transport")
        self._session = f"{self._host}:{self._engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int) -> None:
        if address == 0 or nbytes <= 0:  # NULL would be accepted
            raise EngineError(f"no region: {nbytes} bytes at {address:#x}")
        if (code := self._engine.register_memory(address, nbytes)) != 0:
            raise EngineError(f"Mooncake refused {nbytes} bytes at {address:#x}: {code}")

    def endpoint(self) -> bytes:
        return PREFIX + self._session.encode()

    def connect(self, peer_key: str, endpoint: bytes) -> None:
        peer = self._peers.get(peer_key)
        session = _session(endpoint)
        if session is None:
            return
        if peer is None or (peer.session != session and not peer.flying):
            self._peers[peer_key] = _Peer(session)
        elif peer.session == session:
            peer.dropped = False

    def begin(self, handle: int, peer_key: str, writes: Sequence[Write]) -> list[Completion]:
        peer = self._peers.get(peer_key)
        if peer is None or peer.dropped:
            self.counters.handles_failed += 1
            return [Completion(handle, "the peer is not connected", quiet=True)]
        if time.monotonic() < peer.mute_until:
            self.counters.handles_failed += 1
            return [Completion(handle, MUTE, quiet=True)]
        if any(owner.unknown for owner, _, _ in peer.flying.values()):
            self.counters.handles_failed += 1
            return [Completion(handle, "earlier writes to the peer are of unknown fate", quiet=True)]
        pieces = [
            (src + at, dst + at, min(PIECE, nbytes - at))
            for src, dst, nbytes in writes
            for at in range(0, nbytes, PIECE)
        ]
        owner = _Handle(handle, len(pieces), len(pieces))
        if not pieces:
            return [self._ended(owner)]
        peer.queue.extend((owner, *piece) for piece in pieces)
        return []  # the thread calls advance() next

    def advance(self) -> list[Completion]:
        ended: list[Completion] = []
        now = time.monotonic()
        for key, peer in list(self._peers.items()):
            self._collect(peer, now, ended)
            self._fill(peer, now, ended)
            if peer.dropped and not peer.flying:
                del self._peers[key]
        return ended

    def outstanding(self) -> bool:
        return any(peer.queue or peer.flying for peer in self._peers.values())

    def drop(self, peer_key: str) -> None:
        if (peer := self._peers.get(peer_key)) is not None:
            peer.dropped = True

    def close(self) -> None:
        """Nothing of ours was seen to land afterwards on a live link; on another one the kernel's tail may."""
        self._peers.clear()
        if self._engine is None:
            return
        _free_listener(self._host, self._engine.get_rpc_port())
        alive = weakref.ref(self._engine)
        self._engine = None
        if alive() is not None:
            raise RuntimeError("something still refers to the Mooncake engine")

    # ---- inside

    def _collect(self, peer: _Peer, now: float, ended: list[Completion]) -> None:
        for identifier, (owner, nbytes, deadline) in list(peer.flying.items()):
            status = self._engine.transfer_check_status(identifier)
            if status == 0:
                if now > deadline and not owner.unknown:
                    owner.unknown, owner.given_up = True, "a write has not ended within its deadline"
                    self.counters.handles_unknown += 1
                    ended.append(Completion(owner.number, owner.failed or owner.given_up))
                continue
            del peer.flying[identifier]
            owner.in_flight -= 1
            if status == 1:
                owner.done += 1
                self.counters.bytes_done += nbytes
                self.counters.writes_done += 1
            else:
                owner.failed = f"Mooncake ended a write with {status}"
            self._settle(owner, ended)

    def _fill(self, peer: _Peer, now: float, ended: list[Completion]) -> None:
        while peer.queue and (len(peer.flying) < WINDOW or peer.dropped):
            owner, src, dst, nbytes = peer.queue.popleft()
            owner.queued -= 1
            if peer.dropped:
                owner.given_up = owner.given_up or "the peer was dropped"
            if owner.failed is None and owner.given_up is None:
                if not peer.reached and time.monotonic() < peer.mute_until:
                    owner.given_up = MUTE
                    self._settle(owner, ended)
                    continue
                began = time.monotonic()
                identifier = self._engine.transfer_submit_write(peer.session, src, dst, nbytes)
                if identifier in (0, -1):
                    self._judge_silence(peer, began)
                    # Before the first contact a refusal is the refused connection. Later ones
                    # may be an admission that failed half way: not documented, so not trusted.
                    owner.failed = "Mooncake did not take a write"
                    owner.started = owner.started or peer.reached
                else:
                    owner.started = peer.reached = True
                    owner.in_flight += 1
                    peer.flying[identifier] = (owner, nbytes, now + self._deadline)
            self._settle(owner, ended)

    def _judge_silence(self, peer: _Peer, began: float) -> None:
        """A peer that accepts and never answers holds the library for a minute per try, and everybody's writes
        with it. So what else is queued for it fails at once, and it is tried again ever less often."""
        now = time.monotonic()
        if not peer.reached and now - began > SLOW_REFUSAL:
            peer.pause = min(2 * peer.pause or FIRST_PAUSE, LAST_PAUSE)
            peer.mute_until = now + peer.pause

    def _settle(self, owner: _Handle, ended: list[Completion]) -> None:
        if owner.queued == 0 and owner.in_flight == 0:
            ended.append(self._ended(owner))

    def _ended(self, owner: _Handle) -> Completion:
        """All pieces are terminal. A handle that was reported as unknown is told a second time, with the truth."""
        if owner.failed is not None:
            self.counters.handles_failed += 1
            return Completion(owner.number, owner.failed, quiet=not owner.started)
        if owner.given_up is not None and owner.done < owner.pieces:
            self.counters.handles_failed += 1
            return Completion(owner.number, owner.given_up, quiet=True)
        self.counters.handles_done += 1
        return Completion(owner.number)


def _session(endpoint: bytes) -> str | None:
    """`host:port`, or None for anything else: the bytes are a peer's."""
    text = endpoint.removeprefix(PREFIX).decode("ascii", "replace")
    host, _, port = text.rpartition(":")
    if not endpoint.startswith(PREFIX) or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return text
    return text if host.replace("-", "").replace(".", "").isalnum() else None


def _free_listener(host: str, port: int) -> None:
    """The library's end joins its listening thread, and holds Python's lock meanwhile: a second while that sits
    in accept(), a minute while somebody connected and says nothing. So accept() gets a short timeout, for which
    it must be knocked at once, and connections to it are cut, before the engine is destroyed."""
    for _ in range(20):
        cut = _cut_connections(port)
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=0.5):
            pass
        time.sleep(0.02)
        if not cut:
            break


def _cut_connections(port: int) -> bool:
    """Those accepted at that port of this process. Whether there were any."""
    cut = False
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as ours:
                if ours.family not in (socket.AF_INET, socket.AF_INET6) or ours.getsockname()[1] != port:
                    continue
                if ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 5000))
                else:
                    ours.shutdown(socket.SHUT_RDWR)
                    cut = True
    return cut


def _listeners() -> frozenset[str]:
    """Inodes of this process's listening TCP sockets; empty where /proc does not say."""
    found = set()
    with contextlib.suppress(OSError):
        mine = set()
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
            with contextlib.suppress(OSError), open(table) as lines:
                for line in lines:
                    columns = line.split()
                    if columns[3] == "0A" and f"socket:[{columns[9]}]" in mine:
                        found.add(columns[9])
    return frozenset(found)
