"""Growth and retract: who gets a page when the pool runs dry, and who makes room. Pure policy.

In: the attempts that hold pages, in log order. Out: a victim, or who may come back, or how much to keep
free. Invariants: the oldest is never a victim, so it always finishes and the rest after it; a victim is
younger than whom it makes room for and has no tick in flight; one spill at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.request import Request

# Admission keeps this share of the tokens that admitted requests may still generate free, in permille.
# It rises with each retract and falls with each finished request, between the bounds.
SHARE_START, SHARE_MIN, SHARE_MAX = 400, 100, 1000
SHARE_UP, SHARE_DOWN = 150, 10


class GrowthShare:
    """How cautious admission is; adapts so that retract stays rare without leaving the pool empty.

    Asked at every entry while requests wait for pages, so what it says is kept as requests enter, grow and leave.
    """

    def __init__(self) -> None:
        self.permille = SHARE_START
        self.members = 0
        self.left = 0  # tokens that they may still generate

    def retracted(self) -> None:
        self.permille = min(SHARE_MAX, self.permille + SHARE_UP)

    def finished(self) -> None:
        self.permille = max(SHARE_MIN, self.permille - SHARE_DOWN)

    def enter(self, request: Request) -> None:
        self.members += 1
        self.left += request.left

    def leave(self, request: Request) -> None:
        self.members -= 1
        self.left -= request.left

    def grew(self) -> None:
        """A member generated a token."""
        self.left -= 1

    def expected_with(self, request: Request, page_size: int) -> int:
        """Pages that the members and this one are expected to grow by; 0 if it is alone, and has all the pool.

        Every one grows by whole pages, which is half a page more than its tokens need on average.
        """
        if not self.members:
            return 0
        return -(-(self.left + request.left) * self.permille // (1000 * page_size)) + self.members // 2


def choose_victim(needy: Request, candidates: Sequence[Request]) -> Request | None:
    """`candidates` hold pages, have no tick in flight and are in log order; the youngest one younger than `needy`."""
    for request in reversed(candidates):
        if request.number > needy.number:
            return request
    return None
