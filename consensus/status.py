"""Progress of a room as one rank sees it, and the rule that joins the ranks' views."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class KVPoll(IntEnum):
    """Ordered so that the conclusion over ranks is the minimum; both ends absorb."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4

    @property
    def terminal(self) -> bool:
        return self in (KVPoll.FAILED, KVPoll.SUCCESS)

    def then(self, new: KVPoll) -> KVPoll:
        """The status after a report of `new`: never backwards, and never out of a terminal one."""
        if self.terminal:
            return self
        return new if new is KVPoll.FAILED else max(self, new)


def conclude(views: Iterable[KVPoll | None]) -> KVPoll:
    """Minimum over all ranks; a rank that has not reported counts as BOOTSTRAPPING."""
    return min(KVPoll.BOOTSTRAPPING if view is None else view for view in views)
