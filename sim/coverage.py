"""Which cells of the lifecycles a run reached: (side, state, event), counted at rank 0.

Rare paths that no seed reaches are paths nobody tests; `sim.run` prints what was reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from consensus.entry import Entry
from pipeline.outcome import ERROR
from pipeline.replica import Replica

if TYPE_CHECKING:
    from consensus.entry import Key
    from pipeline.effects import Effect

Cell = tuple[str, str, str]


class Coverage:
    def __init__(self) -> None:
        self.cells: Counter[Cell] = Counter()
        self.faults: Counter[str] = Counter()

    def watch(self, replica: Replica, side: str, look: Callable[[Entry], None]) -> None:
        """Looks at each entry just before `replica` applies it, and lets `look` do so."""
        apply = replica.apply

        def watched(entry: Entry) -> list[Effect]:
            self._count(replica, side, entry)
            look(entry)
            return apply(entry)

        replica.apply = watched  # type: ignore[method-assign]

    def _count(self, replica: Replica, side: str, entry: Entry) -> None:
        def cell(key: Key, event: str) -> None:
            request = replica.requests.get(key)
            state = "unknown" if request is None else request.state
            if request is not None and request.ending is not None:
                state += " (ending)"
            elif request is not None and request.ticks:
                state += " (in tick)"
            self.cells[side, state, event] += 1

        for spec in entry.requests:
            cell(spec.key, "submit")
        for abort in entry.aborts:
            timed = "deadline" if abort.kind == ERROR and not abort.retryable else "stage deadline"
            cell(abort.key, timed if abort.kind == ERROR else "cancel")
        for admission in entry.admissions:
            cell(admission.key, "admitted" if admission.ok else "bootstrap failed")
        for verdict in entry.verdicts:
            for stage, _ in verdict.good:
                cell(stage.key, f"{verdict.topic} good" + self._stale(replica, verdict.topic, stage))
            for stage, _ in verdict.bad:
                cell(stage.key, f"{verdict.topic} bad" + self._stale(replica, verdict.topic, stage))

    @staticmethod
    def _stale(replica: Replica, topic: str, stage: object) -> str:
        return "" if replica.is_votable(topic, stage) else " (stale)"  # type: ignore[arg-type]
