"""PPConsensusStore: room → KVPoll on every rank, replicated in the background to rank 0.

A rank writes its own view through a `Reporter`, which yields the numbered updates to send. Rank 0 folds
the updates of all ranks in a `Leader`, which names the rooms whose conclusion changed: rank 0 is
notified and never polls. Terminal views absorb. A deleted room leaves a tombstone at rank 0 until
every rank has deleted it, so that a late update cannot bring it back.
"""

from __future__ import annotations

import msgspec

from consensus.status import KVPoll, conclude


class Update(msgspec.Struct, frozen=True, array_like=True):
    """One change of one rank's map; `status` None deletes. `number` counts a rank's updates from 1."""

    rank: int
    number: int
    room: str
    status: KVPoll | None
    reason: str = ""


class UpdateLost(Exception):
    """A rank's updates have a hole: its map at rank 0 can no longer be trusted."""


class Reporter:
    """One rank's own map, used like a dict by the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._map: dict[str, KVPoll] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._map)

    def put(self, room: str, status: KVPoll, reason: str = "") -> Update | None:
        """Records `status`; returns the update to send, or None if nothing changed."""
        old = self._map.get(room, KVPoll.BOOTSTRAPPING)
        new = old.then(status)
        if new is old and room in self._map:
            return None
        self._map[room] = new
        return self._update(room, new, reason)

    def delete(self, room: str) -> Update:
        """Forgets the room; sent even if this rank never reported, so that the tombstone can end."""
        self._map.pop(room, None)
        return self._update(room, None, "")

    def _update(self, room: str, status: KVPoll | None, reason: str) -> Update:
        self._number += 1
        return Update(self.rank, self._number, room, status, reason)


class _Room:
    __slots__ = ("concluded", "deleted", "reason", "views")

    def __init__(self, ranks: int) -> None:
        self.views: list[KVPoll | None] = [None] * ranks
        self.deleted = [False] * ranks
        self.concluded = KVPoll.BOOTSTRAPPING
        self.reason = ""


class Leader:
    """Rank 0's view of all ranks' maps, at most as many rooms as the log has opened and not yet ended."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._numbers = [0] * ranks
        self._rooms: dict[str, _Room] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def apply(self, update: Update) -> tuple[KVPoll, str] | None:
        """Folds one update in; returns (conclusion, reason) if the room's conclusion changed.

        Raises `UpdateLost` on a hole in a rank's numbers; a repeated update changes nothing.
        """
        if update.number <= self._numbers[update.rank]:
            return None
        if update.number != self._numbers[update.rank] + 1:
            raise UpdateLost(f"rank {update.rank}: store update {self._numbers[update.rank] + 1} was lost")
        self._numbers[update.rank] = update.number
        room = self._rooms.setdefault(update.room, _Room(self._ranks))
        if update.status is None:
            room.deleted[update.rank] = True
            if all(room.deleted):
                del self._rooms[update.room]
            return None
        if any(room.deleted):
            return None  # the log has closed it; only the tombstone is left
        view = room.views[update.rank]
        old = KVPoll.BOOTSTRAPPING if view is None else view
        room.views[update.rank] = old.then(update.status)
        if update.status is KVPoll.FAILED and not room.reason:
            room.reason = f"rank {update.rank}: {update.reason}"
        concluded = conclude(room.views)
        if concluded is room.concluded:
            return None
        room.concluded = concluded
        return concluded, room.reason
