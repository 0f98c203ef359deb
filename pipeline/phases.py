"""Where the time of an attempt went, read from the log: which phase it was in since when.

In: the records of rank 0, in sequence. Out: per attempt its `Stages`, phases with the entry clock at
which each began. Invariants: the clocks of an attempt never go back, so that the differences are
durations without gaps, all of one clock; nothing here decides anything; what ended is kept only until
it is asked for, and an attempt has at most `MOST` stages however often it is retracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from consensus.entry import Key
from consensus.recorder import Record

Stages = tuple[tuple[str, int], ...]  # phase, clock in µs at which it began

MOST = 32
REPLY: Final = "reply"
FORWARD, GENERATE = "forward", "generate"
# Lifecycle state → phase. Both sides: what waits for a place in a batch is in "wait", whatever computes its
# first own token in "forward".
PHASES = MappingProxyType(
    {
        "bootstrapping": "bootstrap",
        "waiting": "wait",
        "running": FORWARD,
        "inflight": "hand_over",
        "prealloc": "handshake",
        "granted": "allocation",
        "transferring": "transfer",
        "ready": "wait",
        "spilling": "retracted",
        "retracted": "retracted",
        "filling": "retracted",
        "aborting": "abort",
    }
)


class PhaseBook:
    """Of one instance; kept by the shell of rank 0."""

    def __init__(self, first_state: str) -> None:
        self._first_state = first_state
        self._open: dict[Key, list[tuple[str, int]]] = {}
        self._untold: dict[Key, None] = {}  # no token of theirs has been told yet
        self._ended: dict[Key, Stages] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def apply(self, record: Record) -> None:
        clock = record.entry.clock
        for note in record.notes:
            if note[0] not in ("open", "move", "end", "token"):
                continue
            request, attempt = note[1], note[2]
            assert isinstance(request, str) and isinstance(attempt, int)
            key = Key(request, attempt)
            if note[0] == "open":
                self._open[key] = [(PHASES[self._first_state], clock)]
                self._untold[key] = None
            elif (stages := self._open.get(key)) is None:
                continue  # its outcome is told, what follows is nobody's time
            elif note[0] == "move":
                _begin(stages, PHASES.get(str(note[4]), str(note[4])), clock)
            elif note[0] == "token":
                if stages[-1][0] == FORWARD:
                    _begin(stages, GENERATE, clock)
            else:
                self._ended[key] = _until(self._open.pop(key), clock)

    def at_first_token(self, key: Key, clock: int) -> Stages:
        """With an attempt's first token, told by the entry of `clock`; nothing with later ones."""
        if key not in self._untold:
            return ()
        del self._untold[key]
        stages = self._open.get(key) or self._ended.get(key, ())
        return _until(stages, clock)

    def at_end(self, key: Key) -> Stages:
        """With an attempt's outcome; nothing for one that never began."""
        self._untold.pop(key, None)
        return self._ended.pop(key, ())


def _until(stages: Sequence[tuple[str, int]], clock: int) -> Stages:
    return (*(stage for stage in stages if stage[1] < clock), (REPLY, clock))


def _begin(stages: list[tuple[str, int]], phase: str, clock: int) -> None:
    if stages[-1][0] == phase or len(stages) >= MOST:
        return
    if stages[-1][1] == clock:
        stages.pop()  # it lasted no time
    if not stages or stages[-1][0] != phase:
        stages.append((phase, clock))
