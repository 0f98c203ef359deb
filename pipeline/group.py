"""The rules of a group: who may join, which host runs which ranks, and when the next epoch may start. Pure.

In: hellos, news of members, and the time (seconds of any monotonic clock). Out: refusals, and what is still waited
for. Invariant: while ranks of an earlier epoch might be alive anywhere, something is waited for. A member's ranks
are known to be dead when it says so, when a process that owns the same run folder says hello again, or when the
bound has passed within which they end by themselves (`docs/decisions/0003-groups.md`).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

PROTOCOL_VERSION = 1
MARGIN_S = 3.0  # on top of the lease: a look at timers once a second, a last flight recording, a killed process's end


@dataclass(frozen=True, slots=True)
class Terms:
    """What the leader and its members must have in common."""

    protocol_version: int
    release: str
    instance: str
    role: str
    group_size: int
    pp_size: int
    model_digest: str


@dataclass(frozen=True, slots=True)
class Member:
    """What one says of itself."""

    terms: Terms
    index: int
    address: str
    run_dir: str
    model: str
    last_epoch: int


def refusal(ours: Terms, leader_address: str, member: Member) -> str:
    """Why it cannot join, with both values; empty if it can."""
    for name, words in (
        ("protocol_version", "group protocol version"),
        ("release", "release"),
        ("instance", "instance"),
        ("role", "role"),
        ("group_size", "group size"),
        ("pp_size", "number of ranks"),
        ("model_digest", "model digest"),
    ):
        theirs, wanted = getattr(member.terms, name), getattr(ours, name)
        if theirs != wanted:
            return f"{words}: the member's is {theirs!r:.80}, the leader's is {wanted!r:.80}; they must be equal"
    if not 0 < member.index < ours.group_size:
        return f"group index {member.index} is not a member's: they are 1 to {ours.group_size - 1} in a group of {ours.group_size}"  # noqa: E501
    for what, path in (("run folder", member.run_dir), ("model folder", member.model)):
        if not path.startswith("/"):
            return f"the {what} {path[:80]!r} is not an absolute path"
    try:
        there, here = ipaddress.ip_address(member.address), ipaddress.ip_address(leader_address)
    except ValueError:
        return f"address {member.address[:80]!r} is not a numeric IP address"
    if there.is_unspecified or there.is_multicast:
        return f"address {there} is not the address of a host"
    if there.is_loopback != here.is_loopback:
        return (
            f"the member's address is {there}, the leader's is {here}: a loopback address cannot be reached from "
            "another host; give both an --advertise address that the other can reach"
        )
    return ""


def share_out(ranks: int, hosts: int) -> tuple[int, ...]:
    """The host of each rank: neighbours stay together, and no host has two ranks more than another."""
    return tuple(rank * hosts // ranks for rank in range(ranks))


@dataclass(slots=True)
class Seat:
    """What the leader knows of one member's place."""

    member: Member | None = None  # who has it
    absent: str = "has not joined yet"  # else, why not, for people
    dead: int = 0  # the last epoch whose ranks in this place are known to be dead; 0: none


@dataclass(slots=True)
class Muster:
    """The members of a group from the leader's side."""

    size: int
    lease: float
    own_epoch: int  # the last one that the leader's run folder remembers; 0: none
    last_epoch: int = 0  # the last one that anybody remembers
    seats: dict[int, Seat] = field(default_factory=dict)
    fenced_at: float = 0.0  # from when on no rank of an earlier epoch can be alive, whatever is known

    def __post_init__(self) -> None:
        self.seats = {index: Seat() for index in range(1, self.size)}
        self.last_epoch = self.own_epoch

    def name(self, index: int) -> str:
        return f"member {index} of {self.size}"

    def join(self, member: Member) -> None:
        seat = self.seats[member.index]
        assert seat.member is None, "a place has one owner"
        seat.member, seat.absent = member, ""
        # It holds the run folder in which the ranks of that epoch lived in this place, so they are dead.
        seat.dead = max(seat.dead, member.last_epoch)
        self.last_epoch = max(self.last_epoch, member.last_epoch)

    def leave(self, index: int, why: str) -> None:
        """It is gone, or about to go: nothing more is started there."""
        self.seats[index].member, self.seats[index].absent = None, why

    def start(self, epoch: int, now: float) -> None:
        """Ranks are about to be started everywhere."""
        assert not self.waiting(now) and epoch > self.last_epoch
        self.own_epoch = self.last_epoch = epoch

    def reaped(self, index: int, epoch: int) -> None:
        """Its member says so."""
        self.seats[index].dead = max(self.seats[index].dead, epoch)

    def ended(self, now: float) -> None:
        """The leader's own ranks are dead. From here on counts what bounds the life of those that are out of reach:
        a member that lives gives them up with its lease, and without rank 0 they stop for want of log entries."""
        self.fenced_at = now + self.lease + MARGIN_S

    def waiting(self, now: float) -> str:
        """What the next epoch waits for, for people; empty: it may start."""
        missing = [f"{self.name(index)}, which {seat.absent}" for index, seat in self.seats.items() if not seat.member]
        if missing:
            return "waiting for " + ", and for ".join(missing)
        # A leader that has forgotten the last epoch cannot know who had which place in it.
        knows = 0 < self.own_epoch == self.last_epoch
        unproven = [self.name(i) for i, seat in self.seats.items() if not knows or seat.dead < self.own_epoch]
        if unproven and now < self.fenced_at:
            bound = self.lease + MARGIN_S
            return f"waiting up to {bound:g} s until no earlier rank of {', '.join(unproven)} can be alive any more"
        return ""
