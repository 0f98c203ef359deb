"""A backend's own best: its library called directly, on the same writes, without our engine or ports.

`prepare` is outside the measured time, `move` inside. Both libraries are used as their measured facts say is
fastest: Mooncake with pieces of at most 1 MiB and 64 in flight, or as one batch that blocks; NIXL as one prepared
transfer whose neighbouring descriptors it merges. A backend that is all ours has no library: its engine is its best.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

from transfer.io.mooncake import PIECE, PREFIX, WINDOW
from transfer.regions import Write

from .messages import Begin
from .pool import Pool
from .ports_loop import DEADLINE, TransferFailed

# Between two looks: a thread that spins takes a processor from the library's own.
FIRST_PAUSE, LAST_PAUSE = 0.0001, 0.001


class Library(Protocol):
    methods: tuple[str, ...]

    def prepare(self, method: str, writes: Sequence[Write]) -> None: ...
    def move(self, method: str, writes: Sequence[Write]) -> None: ...


def library_for(begin: Begin, source: Pool, endpoint: bytes) -> Library | None:
    """To be called after the backend's engine has started: that sets the library's environment, before its import."""
    if begin.backend == "mooncake":
        return MooncakeLibrary(begin.host, source, endpoint)
    if begin.backend == "nixl":
        return NixlLibrary(source, endpoint)
    return None


class MooncakeLibrary:
    methods: tuple[str, ...] = ("window", "batch")

    def __init__(self, host: str, source: Pool, endpoint: bytes) -> None:
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransferFailed(f"a second Mooncake did not start on {host}")
        if self._engine.register_memory(source.base, source.nbytes) != 0:
            raise TransferFailed("a second Mooncake refused the pool")
        self._session = endpoint.removeprefix(PREFIX).decode()
        self._pieces: list[Write] = []
        self._columns: tuple[list[int], list[int], list[int]] = ([], [], [])

    def prepare(self, method: str, writes: Sequence[Write]) -> None:
        self._pieces = [
            (src + at, dst + at, min(PIECE, nbytes - at))
            for src, dst, nbytes in writes
            for at in range(0, nbytes, PIECE)
        ]
        src, dst, nbytes = zip(*self._pieces, strict=True)
        self._columns = (list(src), list(dst), list(nbytes))

    def move(self, method: str, writes: Sequence[Write]) -> None:
        if method == "window":
            self._window()
        elif self._engine.batch_transfer_sync_write(self._session, *self._columns) != 0:
            raise TransferFailed("Mooncake failed a batch")

    def _window(self) -> None:
        waiting, flying = iter(self._pieces), set[int]()
        deadline, left, pause = time.monotonic() + DEADLINE, len(self._pieces), FIRST_PAUSE
        while left:
            while len(flying) < WINDOW and (piece := next(waiting, None)) is not None:
                identifier = self._engine.transfer_submit_write(self._session, *piece)
                if identifier in (0, -1):
                    raise TransferFailed("Mooncake did not take a write")
                flying.add(identifier)
            for identifier in list(flying):
                if (status := self._engine.transfer_check_status(identifier)) != 0:
                    flying.discard(identifier)
                    left, pause = left - 1, FIRST_PAUSE
                    if status != 1:
                        raise TransferFailed(f"Mooncake ended a write with {status}")
            if time.monotonic() > deadline:
                raise TransferFailed(f"Mooncake did not end within {DEADLINE:.0f} s")
            if left and len(flying) == min(WINDOW, left):
                time.sleep(pause)
                pause = min(1.5 * pause, LAST_PAUSE)


class NixlLibrary:
    methods: tuple[str, ...] = ("prepped",)

    def __init__(self, source: Pool, endpoint: bytes) -> None:
        # The engine's driver has tamed the progress threads of this module's agents, this one's as well.
        api = importlib.import_module("nixl._api")
        self._agent: Any = api.nixl_agent("transfer-bench", api.nixl_agent_config())
        self._agent.register_memory([(source.base, source.nbytes, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(endpoint)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._requests: dict[int, Any] = {}  # by the identity of the writes, which live as long as the process
        self._sides: list[Any] = []

    def prepare(self, method: str, writes: Sequence[Write]) -> None:
        if id(writes) in self._requests:
            return
        local = self._agent.get_xfer_descs([(src, nbytes, 0) for src, _, nbytes in writes], "DRAM")
        remote = self._agent.get_xfer_descs([(dst, nbytes, 0) for _, dst, nbytes in writes], "DRAM")
        sides = self._agent.prep_xfer_dlist("", local), self._agent.prep_xfer_dlist(self._peer, remote)
        every = list(range(len(writes)))
        self._requests[id(writes)] = self._agent.make_prepped_xfer("WRITE", sides[0], every, sides[1], every)
        self._sides += sides

    def move(self, method: str, writes: Sequence[Write]) -> None:
        request, deadline, pause = self._requests[id(writes)], time.monotonic() + DEADLINE, FIRST_PAUSE
        state = self._agent.transfer(request)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, LAST_PAUSE)
            state = self._agent.check_xfer_state(request)
        if state != "DONE":
            raise TransferFailed(f"NIXL ended a transfer with {state}")
