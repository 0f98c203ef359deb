"""Growth and retract: who gets a page when the pool runs dry, and who makes room. Pure policy.

In: the attempts that hold pages, in log order. Out: a victim, or who may come back, or how much to keep
free. Invariants: the oldest is never a victim, so it always finishes and the rest after it; a victim is
younger than whom it makes room for and has no tick in flight; one spill at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.request import Request

# Admission keeps this share of the tokens that admitted requests may still generate free, in permille.
# It rises with each retract and falls with each finished request, between the bounds.
SHARE_START, SHARE_MIN, SHARE_MAX = 400, 100, 1000
SHARE_UP, SHARE_DOWN = 150, 10


class GrowthShare:
    """How cautious admission is; adapts so that retract stays rare without leaving the pool empty."""

    def __init__(self) -> None:
        self.permille = SHARE_START

    def retracted(self) -> None:
        self.permille = min(SHARE_MAX, self.permille + SHARE_UP)

    def finished(self) -> None:
        self.permille = max(SHARE_MIN, self.permille - SHARE_DOWN)

    def expected(self, requests: Iterable[Request], page_size: int) -> int:
        """Pages that these requests are expected to grow by."""
        pages, permille, whole = 0, self.permille, 1000 * page_size
        for request in requests:
            pages += -(-(request.budget - len(request.output)) * permille // whole)
        return pages


def choose_victim(needy: Request, candidates: Sequence[Request]) -> Request | None:
    """`candidates` hold pages, have no tick in flight and are in log order; the youngest one younger than `needy`."""
    for request in reversed(candidates):
        if request.number > needy.number:
            return request
    return None
