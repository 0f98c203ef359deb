"""A pretended forward: a thread that computes as long as a layer takes, and says when its KV would be written.

A layer writes its KV before it attends, so the word comes after a quarter of its time. The thread multiplies
matrices, for on a CPU the transfer competes with the forward.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from types import TracebackType

import torch

SIZE = 256
BEFORE_KV = 0.25


class Forward:
    def __init__(self, layers: int, tokens: int, chunk: int, layer_seconds: float) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.ended = 0.0  # when the last chunk's forward did
        self._written: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self._work = layers, tokens, chunk, layer_seconds
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)

    def __enter__(self) -> Forward:
        torch.set_num_threads(1)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join()
        os.close(self.fd)

    @property
    def over(self) -> bool:
        return self.ended > 0 and self._written.empty()

    def written(self) -> list[tuple[int, int, int]]:
        """(first position, end, layer), as they came."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        found = []
        while not self._written.empty():
            found.append(self._written.get_nowait())
        return found

    def _run(self) -> None:
        layers, tokens, chunk, seconds = self._work
        left, right, into = (torch.ones(SIZE, SIZE) for _ in range(3))

        def compute(share: float) -> None:
            until = time.monotonic() + share * seconds
            while time.monotonic() < until:
                torch.mm(left, right, out=into)

        for start in range(0, tokens, chunk):
            for layer in range(layers):
                compute(BEFORE_KV)
                self._written.put((start, min(start + chunk, tokens), layer))
                os.eventfd_write(self.fd, 1)
                compute(1 - BEFORE_KV)
        self.ended = time.monotonic()
        os.eventfd_write(self.fd, 1)
