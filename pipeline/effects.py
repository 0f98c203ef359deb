"""What the core asks of the shell. A closed union: the shell is a `match` over it and nothing more.

Effects of the log (the second group) are equal on every rank; `Reply` and `End` reach the shell of
rank 0 only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from consensus.entry import Ballot, Entry, Key, PeerRef, TokenOut, Trailer
from consensus.store import Update
from consensus.votes import Bell
from pipeline.outcome import Outcome
from pipeline.planner import Batch


@dataclass(frozen=True, slots=True)
class Relay:
    """Pass an entry on to the next rank."""

    entry: Entry
    trailer: Trailer


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Last rank → rank 0: everything up to `seq` is applied; `ballots` are the merged votes of entry `seq`."""

    seq: int
    ballots: tuple[Ballot, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Any rank → rank 0, in the background: a store update or a doorbell."""

    item: Update | Bell


@dataclass(frozen=True, slots=True)
class OpenRoom:
    """The log opened an attempt: prefill prepares a sender, decode a receiver and its handshakes."""

    key: Key
    peer: PeerRef
    prompt_len: int
    token: bytes = field(default=b"", repr=False)  # which decode's ranks show and prefill's ranks expect


@dataclass(frozen=True, slots=True)
class StartSender:
    """Prefill: the prompt's pages are known; slices follow as chunks are written."""

    room: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendDestinations:
    """Decode: tell the peer's ranks where the prompt's KV goes."""

    room: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Prefill: the first output token, for the sampler rank to send with the hand-over."""

    room: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class StopRoom:
    """Submit nothing more for the room, tell the peer, and report when it is quiet."""

    room: str
    reason: str


@dataclass(frozen=True, slots=True)
class CloseRoom:
    """The attempt is over on this side; forget the room."""

    room: str


@dataclass(frozen=True, slots=True)
class CopyToHost:
    """Save the KV of these pages in host memory; `stage_seq` names the work in its observation."""

    room: str
    stage_seq: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyFromHost:
    """Put the saved KV into these pages and forget the copy."""

    room: str
    stage_seq: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropHostCopy:
    """The attempt ended while it was retracted, or a copy failed: forget what was saved, and report the
    release of its pages when no copy of this rank touches them any more."""

    room: str


@dataclass(frozen=True, slots=True)
class Run:
    """Queue a batch for the executor."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Skip:
    """Every attempt in this tick has ended: a rank that has not begun it need not compute it, only pass it on.

    No rank need know what another one did: whatever the tick returns, the log says before that nobody wants it."""

    tick: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Output tokens of an attempt, from `position`."""

    key: Key
    position: int
    tokens: tuple[TokenOut, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The attempt's one outcome on this side."""

    key: Key
    outcome: Outcome


RoomEffect = OpenRoom | StartSender | SendDestinations | FirstToken | StopRoom | CloseRoom
HostEffect = CopyToHost | CopyFromHost | DropHostCopy
Effect = Relay | Acknowledge | Report | RoomEffect | HostEffect | Run | Skip | Reply | End
