"""The compute loop of a process, or none. torch is imported only if one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .messages import ComputeStart, ComputeStop, Done, Question, Worked

if TYPE_CHECKING:
    from .matmul import MatmulLoop


class MatmulSlot:
    def __init__(self) -> None:
        self._loop: MatmulLoop | None = None

    def answer(self, question: Question) -> Done | Worked | None:
        """None: it is not about compute."""
        match question:
            case ComputeStart(threads):
                from .matmul import MatmulLoop

                self._loop = MatmulLoop(threads)
                return Done()
            case ComputeStop():
                assert self._loop is not None, "compute was not started"
                rate = self._loop.stop()
                self._loop = None
                return Worked(rate)
            case _:
                return None
