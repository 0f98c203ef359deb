"""Who is registered, and until when.

In: names, addresses, epochs, and the time. Out: grants, refusals, and who must be forgotten. Pure. A name
has at most one incarnation, an address at most one name; a lease that is not renewed ends, unless it was
this process that stood still.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    address: str
    epoch: int
    until: float


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    full: bool = False  # there is no place; otherwise the name is another's


class Leases:
    def __init__(self, seconds: float, most: int) -> None:
        self.seconds = seconds
        self._most = most
        self._held: dict[str, Lease] = {}
        self._looked: float | None = None

    def renew(self, name: str, address: str, epoch: int, now: float) -> Refusal | None:
        """From now on `name` is this incarnation at this address, for a while."""
        held = self._held.get(name)
        if held is not None:
            where = f"{name} at {held.address} is registered with epoch {held.epoch}"
            if epoch < held.epoch:
                return Refusal(f"{where}, which is newer than {epoch}")
            if epoch == held.epoch and address != held.address:
                return Refusal(f"{where}, and so would be {address}: two instances cannot have one name")
        elif len(self._held) >= self._most:
            return Refusal(f"{self._most} instances are registered, and no more are taken", full=True)
        for other in [n for n, lease in self._held.items() if lease.address == address and n != name]:
            del self._held[other]  # what runs there now has told its name
        self._held[name] = Lease(address, epoch, now + self.seconds)
        return None

    def name_at(self, address: str) -> str:
        """Who holds it; empty: nobody."""
        return next((name for name, lease in self._held.items() if lease.address == address), "")

    def end(self, name: str, epoch: int) -> bool:
        """The incarnation has left. False: another one is registered, or none."""
        held = self._held.get(name)
        if held is None or held.epoch != epoch:
            return False
        del self._held[name]
        return True

    def look(self, now: float, every: float) -> list[str]:
        """Names whose leases have ended. To be asked each `every` seconds: a much later call means that this process
        stood still, and heartbeats may lie unread."""
        late = 0.0 if self._looked is None else now - self._looked - every
        self._looked = now
        if late > every:
            for name, lease in self._held.items():
                self._held[name] = Lease(lease.address, lease.epoch, lease.until + late)
        ended = [name for name, lease in self._held.items() if lease.until <= now]
        for name in ended:
            del self._held[name]
        return ended

    def held(self) -> dict[str, Lease]:
        """By address."""
        return {lease.address: lease for lease in self._held.values()}
