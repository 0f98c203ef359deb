"""Who holds which pages. The one place that can free a page.

A page has two lifetimes: its request's, and its readers' and writers'. A lease is held by holders (the
request, each launched tick that touches the pages, a remote writer, a local sender) and its pages
return to the pool when the last one is gone, never earlier. Every page is free, or owned by exactly
one lease that its request still holds, or quarantined in one that it does not (invariant 2).
"""

from __future__ import annotations

from collections.abc import ItemsView

from consensus.entry import Key
from pipeline.pages import PagePool

Holder = tuple[str | int, ...]
REQUEST: Holder = ("request",)
SENDER: Holder = ("sender",)  # this rank's transfer engine may read the pages
WRITER: Holder = ("writer",)  # a remote transfer engine may write into the pages


def tick_holder(tick: int) -> Holder:
    return ("tick", tick)


def copy_holder(stage_seq: int) -> Holder:
    """A copy to or from host memory, named by the stage it belongs to."""
    return ("copy", stage_seq)


class Lease:
    """Pages of one attempt, in token order, and their holders."""

    __slots__ = ("holders", "pages")

    def __init__(self, pages: tuple[int, ...], holders: tuple[Holder, ...]) -> None:
        self.pages = pages
        self.holders: dict[Holder, None] = dict.fromkeys(holders)


class LeaseBook:
    """All leases over one pool."""

    def __init__(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self._leases: dict[Key, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def items(self) -> ItemsView[Key, Lease]:
        return self._leases.items()

    def restore(self, runs: list[tuple[int, int]], leases: dict[Key, Lease]) -> None:
        """Becomes what a snapshot says."""
        self.pool.runs, self.pool.free = list(runs), sum(length for _, length in runs)
        self._leases = leases
        self.audit()

    def fits(self, count: int) -> bool:
        return count <= self.pool.free

    def open(self, key: Key, count: int, *holders: Holder) -> Lease:
        """Gives `count` pages to an attempt that has none."""
        assert key not in self._leases, f"{key} has a lease"
        lease = self._leases[key] = Lease(self.pool.take(count), holders)
        return lease

    def grow(self, key: Key, count: int) -> tuple[int, ...]:
        """Adds pages at the end of a lease that its request holds."""
        lease = self._leases[key]
        assert REQUEST in lease.holders
        pages = self.pool.take(count)
        lease.pages += pages
        return pages

    def get(self, key: Key) -> Lease:
        return self._leases[key]

    def hold(self, key: Key, holder: Holder) -> None:
        lease = self._leases[key]
        assert holder not in lease.holders, f"{key} is held by {holder} already"
        lease.holders[holder] = None

    def drop(self, key: Key, holder: Holder) -> tuple[int, ...]:
        """Takes a holder away; returns the pages that became free (none while another one holds)."""
        lease = self._leases.get(key)
        if lease is None or holder not in lease.holders:
            return ()
        del lease.holders[holder]
        if lease.holders:
            return ()
        del self._leases[key]
        self.pool.give(lease.pages)
        return lease.pages

    def count(self) -> dict[str, int]:
        """Pages by state; the sum is the pool."""
        owned = quarantined = 0
        for lease in self._leases.values():
            if REQUEST in lease.holders:
                owned += len(lease.pages)
            else:
                quarantined += len(lease.pages)
        return {"free": self.pool.free, "owned": owned, "cached": 0, "quarantined": quarantined}

    def audit(self) -> None:
        """Proves invariant 2: every page is free or in exactly one lease. Raises AssertionError otherwise."""
        seen = [0] * self.pool.size
        for page in self.pool.ids():
            seen[page] += 1
        for key, lease in self._leases.items():
            assert lease.holders, f"{key} has pages and no holder"
            for page in lease.pages:
                seen[page] += 1
        wrong = [page for page, times in enumerate(seen) if times != 1]
        assert not wrong, f"pages not in exactly one place: {wrong[:8]}"
