"""A compute loop beside the transfers: how many products of matrices per second does it get done?"""

from __future__ import annotations

import threading
import time

import torch

SIZE = 384  # a product takes a few milliseconds: a slice holds hundreds


class MatmulLoop:
    """On a thread of its own, as a rank's executor is; torch releases Python's lock while it multiplies."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._stop = threading.Event()
        self._count, self._began = 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="matmul", daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Products per second."""
        self._stop.set()
        self._thread.join()
        return self._count / (time.monotonic() - self._began)

    def _run(self) -> None:
        left, right, into = (torch.ones(SIZE, SIZE) for _ in range(3))
        while not self._stop.is_set():
            torch.mm(left, right, out=into)
            self._count += 1
