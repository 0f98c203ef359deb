"""NIXL over UCX, driven from the owned thread.

In: lists of writes. Out: completions, one per handle. Facts that shape this file: the
Python package hard-codes a progress thread that spins, so its delay is set behind its back;
a NIXL process dies at its exit once UCX's ib module is loaded, so that is left out; an active
handle is never released, since that neither cancels it nor keeps it valid; a target does not
check its registration, so bounds are ours to check; after a disconnect the peer must be
removed and added anew; an agent's name is used by one incarnation only.
"""

from __future__ import annotations

import importlib
import os
import time
import types
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from ..handshake import loopback
from ..regions import Write
from .engine import Completion, EngineCounters, EngineError

# Waking up is what an idle engine costs: a thousand times a second took 2 to 3 % of a processor.
PROGRESS_DELAY_US = 5000
WINDOW = 64  # handles per peer that the library holds at once
SLOWEST_RATE = 20e6  # bytes per second that a handle may be as slow as before its fate is unknown

ENVIRONMENT = {
    "UCX_MODULES": "^ib,cuda",
    "UCX_TLS": "tcp",
    "UCX_TCP_USER_TIMEOUT": "5s",
    "UCX_TCP_SYN_CNT": "2",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
}


# Without tcp, so that a host whose device does not work fails instead of crawling. Untested.
RDMA_ENVIRONMENT = {
    "UCX_TLS": "rc_x,rc,dc_x,dc,cuda_copy,cuda_ipc",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
}


@dataclass(slots=True)
class _Flying:
    request: Any
    nbytes: int
    writes: int
    deadline: float
    unknown: bool = False


@dataclass(slots=True)
class _Peer:
    endpoint: bytes
    agent: str
    broken: bool = False
    dropped: bool = False
    queue: deque[tuple[int, Sequence[Write]]] = field(default_factory=deque)
    flying: dict[int, _Flying] = field(default_factory=dict)


class NixlDriver:
    name = "nixl"

    def __init__(self, host: str, device: str, handle_deadline: float) -> None:
        self.counters = EngineCounters()
        self._host, self._device = host, device
        self._deadline = handle_deadline
        self._peers: dict[str, _Peer] = {}
        self._agent: Any = None
        self._ended: list[Completion] = []

    def open(self) -> None:
        for variable, value in (RDMA_ENVIRONMENT if self._device else ENVIRONMENT).items():
            os.environ.setdefault(variable, value)
        if self._device:
            os.environ.setdefault("UCX_NET_DEVICES", ",".join(f"{name}:1" for name in self._device.split(",")))
        elif loopback(self._host):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        try:
            api = importlib.import_module("nixl._api")
            bindings = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise EngineError(f"cannot load NIXL ({error}); it needs the Python package nixl") from error
        tame_progress_thread(api, bindings)
        config = api.nixl_agent_config(capture_telemetry=True)
        self._agent = api.nixl_agent(f"paceline-{uuid.uuid4().hex}", config)
        if "UCX" not in self._agent.backends:
            raise EngineError("NIXL started without its UCX backend")

    def register(self, address: int, nbytes: int) -> None:
        if address == 0 or nbytes <= 0:
            raise EngineError(f"no region: {nbytes} bytes at {address:#x}")
        self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")

    def endpoint(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def connect(self, peer_key: str, endpoint: bytes) -> None:
        peer = self._peers.get(peer_key)
        if peer is not None and peer.endpoint == endpoint and (peer.flying or not peer.broken):
            peer.dropped = False
            return
        if peer is not None and peer.flying:
            return
        if peer is not None:
            self._agent.remove_remote_agent(peer.agent)
            del self._peers[peer_key]
        name = self._agent.add_remote_agent(endpoint)
        self._peers[peer_key] = _Peer(endpoint, name.decode() if isinstance(name, bytes) else name)

    def begin(self, handle: int, peer_key: str, writes: Sequence[Write]) -> list[Completion]:
        peer = self._peers.get(peer_key)
        if peer is not None and peer.broken and not peer.flying and not peer.dropped:
            self.connect(peer_key, peer.endpoint)
            peer = self._peers.get(peer_key)
        refusal = None
        if peer is None or peer.dropped:
            refusal = "the peer is not connected"
        elif peer.broken:
            refusal = "the connection to the peer broke"
        elif any(flying.unknown for flying in peer.flying.values()):
            refusal = "earlier writes to the peer are of unknown fate"
        if peer is None or refusal is not None:
            self.counters.handles_failed += 1
            return [Completion(handle, refusal, quiet=True)]
        peer.queue.append((handle, writes))
        return []

    def advance(self) -> list[Completion]:
        now = time.monotonic()
        for key, peer in list(self._peers.items()):
            for handle, flying in list(peer.flying.items()):
                self._check(peer, handle, flying, now)
            while peer.queue and (len(peer.flying) < WINDOW or peer.broken or peer.dropped):
                self._post(peer, *peer.queue.popleft(), now)
            if peer.dropped and not peer.flying:
                del self._peers[key]
                self._agent.remove_remote_agent(peer.agent)
        ended, self._ended = self._ended, []
        return ended

    def outstanding(self) -> bool:
        return any(peer.queue or peer.flying or peer.dropped for peer in self._peers.values())

    def drop(self, peer_key: str) -> None:
        if (peer := self._peers.get(peer_key)) is not None:
            peer.dropped = True

    def close(self) -> None:
        """Active handles are left to the agent's end: releasing one is neither a cancel nor safe."""
        self._peers.clear()
        alive = None if self._agent is None else weakref.ref(self._agent.agent)
        self._agent = None
        if alive is not None and alive() is not None:
            raise RuntimeError("something still refers to the NIXL agent")

    # ---- inside

    def _post(self, peer: _Peer, handle: int, writes: Sequence[Write], now: float) -> None:
        if peer.broken or peer.dropped:
            self._fail(handle, "the peer went before the transfer began", quiet=True)
            return
        table = numpy.asarray(writes, dtype=numpy.uint64).reshape(-1, 3)
        if not len(table):
            self._done(handle, 0, 0)
            return
        device = numpy.zeros(len(table), dtype=numpy.uint64)
        local = numpy.stack((table[:, 0], table[:, 2], device), axis=1)
        remote = numpy.stack((table[:, 1], table[:, 2], device), axis=1)
        try:
            request = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(local, "DRAM"),
                self._agent.get_xfer_descs(remote, "DRAM"),
                peer.agent,
            )
        except Exception as error:  # the bindings' exceptions share no useful base; nothing was posted
            self._fail(handle, f"NIXL refused the transfer: {error}", quiet=True)
            return
        nbytes = int(table[:, 2].sum())
        flying = _Flying(request, nbytes, len(table), now + self._deadline + nbytes / SLOWEST_RATE)
        peer.flying[handle] = flying
        try:
            state = self._agent.transfer(request)
        except Exception as error:
            self._lost(peer, handle, f"NIXL could not post: {error or type(error).__name__}")
            return
        self._judge(peer, handle, flying, state, now)

    def _check(self, peer: _Peer, handle: int, flying: _Flying, now: float) -> None:
        try:
            state = self._agent.check_xfer_state(flying.request)
        except Exception as error:
            self._lost(peer, handle, f"NIXL: {error or type(error).__name__}")
            return
        self._judge(peer, handle, flying, state, now)

    def _judge(self, peer: _Peer, handle: int, flying: _Flying, state: str, now: float) -> None:
        if state == "DONE":
            del peer.flying[handle]
            self._done(handle, self._moved(flying), flying.writes)
            self._agent.release_xfer_handle(flying.request)
        elif state != "PROC":
            self._lost(peer, handle, f"NIXL ended a transfer with {state}")
        elif now > flying.deadline and not flying.unknown:
            flying.unknown = True
            self.counters.handles_unknown += 1
            self._ended.append(Completion(handle, "a transfer has not ended within its deadline"))

    def _lost(self, peer: _Peer, handle: int, reason: str) -> None:
        """Terminal for the library, which is no proof of quiet at the target."""
        peer.broken = True
        del peer.flying[handle]
        self._fail(handle, reason, quiet=False)

    def _fail(self, handle: int, reason: str, quiet: bool) -> None:
        self.counters.handles_failed += 1
        self._ended.append(Completion(handle, reason, quiet))

    def _done(self, handle: int, nbytes: int, writes: int) -> None:
        self.counters.bytes_done += nbytes
        self.counters.writes_done += writes
        self.counters.handles_done += 1
        self._ended.append(Completion(handle))

    def _moved(self, flying: _Flying) -> int:
        try:
            return int(self._agent.get_xfer_telemetry(flying.request).totalBytes)
        except Exception:  # telemetry is switched off by some builds
            return flying.nbytes


def tame_progress_thread(api: Any, bindings: Any) -> None:
    """Let UCX's progress thread poll with a timeout: the package writes 0 into this field, which spins."""

    class Config(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    names = {name: getattr(bindings, name) for name in dir(bindings) if not name.startswith("__")}
    api.nixlBind = types.SimpleNamespace(**{**names, "nixlAgentConfig": Config})
