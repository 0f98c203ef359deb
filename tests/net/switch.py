"""An Ethernet switch in this process, between TAP devices: what every frame meets on its way can be set.

In: frames of the hosts' TAP devices, and per direction a `Path`. Out: the frames that come through, late,
in order. One thread moves them. The path of a direction can be changed at any moment; frames that are on
their way already arrive. Only frames to a known host are forwarded: no broadcast, no flooding.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
LARGEST_FRAME = 65536
FRAMES_PER_READ = 64
IDLE = 0.2  # seconds; the thread looks at `_running` that often


@dataclass(frozen=True, slots=True)
class Path:
    """One direction between two hosts."""

    delay: float = 0.0  # seconds
    loss: float = 0.0  # probability
    rate: float = 1e9  # bytes per second
    backlog: float = 0.2  # seconds of frames that wait for their turn; more are dropped, as in any switch
    cut: bool = False


@dataclass(slots=True)
class _Port:
    device: int
    address: bytes  # Ethernet
    paths: dict[str, Path] = field(default_factory=dict)  # by the other host
    free_at: dict[str, float] = field(default_factory=dict)  # when the last frame has left for it


def open_tap(name: str) -> int:
    """The device lives as long as the descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device


class Switch:
    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._ports: dict[str, _Port] = {}
        self._hosts: dict[bytes, str] = {}
        self._queue: list[tuple[float, int, int, bytes]] = []  # due, number, device, frame
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._running = True
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)

    def plug(self, host: str, device: int, address: bytes) -> None:
        """Before `start`. The device becomes the switch's: it is closed with it."""
        self._ports[host] = _Port(device, address)
        self._hosts[address] = host

    def start(self) -> None:
        self._thread.start()

    def set_path(self, source: str, target: str, path: Path) -> None:
        with self._lock:
            self._ports[source].paths[target] = path

    def path(self, source: str, target: str) -> Path:
        with self._lock:
            return self._ports[source].paths.get(target, Path())

    def close(self) -> None:
        self._running = False
        if self._thread.ident is not None:
            self._thread.join()
        for port in self._ports.values():
            os.close(port.device)

    # ---- inside

    def _run(self) -> None:
        poller = select.poll()
        hosts = {port.device: host for host, port in self._ports.items()}
        for device in hosts:
            poller.register(device, select.POLLIN)
        while self._running:
            wait = IDLE if not self._queue else min(IDLE, self._queue[0][0] - time.monotonic())
            for device, _ in poller.poll(max(0, wait * 1000)):
                self._take(hosts[device], device)
            while self._queue and self._queue[0][0] <= time.monotonic():
                _, _, device, frame = heapq.heappop(self._queue)
                with contextlib.suppress(OSError):  # the host is down, or takes no more
                    os.write(device, frame)

    def _take(self, source: str, device: int) -> None:
        for _ in range(FRAMES_PER_READ):
            try:
                frame = os.read(device, LARGEST_FRAME)
            except OSError:
                return
            target = self._hosts.get(frame[:6])
            if target is not None:
                self._forward(source, target, frame)

    def _forward(self, source: str, target: str, frame: bytes) -> None:
        now = time.monotonic()
        port, path = self._ports[source], self.path(source, target)
        begin = max(now, port.free_at.get(target, 0.0))
        if path.cut or begin - now > path.backlog or self._random.random() < path.loss:
            return
        port.free_at[target] = end = begin + len(frame) / path.rate
        entry = (end + path.delay, next(self._numbers), self._ports[target].device, frame)
        heapq.heappush(self._queue, entry)
