"""What the core asks of the shell. A closed union: the shell is a `match` over it and nothing more.

Effects of the log (the second group) are equal on every rank; `Reply` and `End` reach the shell of
rank 0 only.
"""

from __future__ import annotations

import msgspec

from consensus.entry import Ballot, Entry, Key, PeerRef, TokenOut, Trailer
from consensus.store import Update
from consensus.votes import Bell
from pipeline.outcome import Outcome
from pipeline.planner import Batch


class Relay(msgspec.Struct, frozen=True):
    """Pass an entry on to the next rank."""

    entry: Entry
    trailer: Trailer


class Acknowledge(msgspec.Struct, frozen=True):
    """Last rank → rank 0: everything up to `seq` is applied; `ballots` are the merged votes of entry `seq`."""

    seq: int
    ballots: tuple[Ballot, ...]


class Report(msgspec.Struct, frozen=True):
    """Any rank → rank 0, in the background: a store update or a doorbell."""

    item: Update | Bell


class OpenRoom(msgspec.Struct, frozen=True):
    """The log opened an attempt: prefill prepares a sender, decode a receiver and its handshakes."""

    key: Key
    peer: PeerRef
    prompt_len: int
    token: bytes = b""  # which decode's ranks show and prefill's ranks expect

    def __repr__(self) -> str:
        """Without the token: it opens the room to whoever reads it."""
        return f"OpenRoom(key={self.key!r}, peer={self.peer!r}, prompt_len={self.prompt_len!r})"


class StartSender(msgspec.Struct, frozen=True):
    """Prefill: the prompt's pages are known; slices follow as chunks are written."""

    room: str
    pages: tuple[int, ...]


class SendDestinations(msgspec.Struct, frozen=True):
    """Decode: tell the peer's ranks where the prompt's KV goes."""

    room: str
    pages: tuple[int, ...]


class FirstToken(msgspec.Struct, frozen=True):
    """Prefill: the first output token, for the sampler rank to send with the hand-over."""

    room: str
    payload: bytes


class StopRoom(msgspec.Struct, frozen=True):
    """Submit nothing more for the room, tell the peer, and report when it is quiet."""

    room: str
    reason: str


class CloseRoom(msgspec.Struct, frozen=True):
    """The attempt is over on this side; forget the room."""

    room: str


class CopyToHost(msgspec.Struct, frozen=True):
    """Save the KV of these pages in host memory; `stage_seq` names the work in its observation."""

    room: str
    stage_seq: int
    pages: tuple[int, ...]


class CopyFromHost(msgspec.Struct, frozen=True):
    """Put the saved KV into these pages and forget the copy."""

    room: str
    stage_seq: int
    pages: tuple[int, ...]


class DropHostCopy(msgspec.Struct, frozen=True):
    """The attempt ended while it was retracted, or a copy failed: forget what was saved, and report the
    release of its pages when no copy of this rank touches them any more."""

    room: str


class Run(msgspec.Struct, frozen=True):
    """Queue a batch for the executor."""

    batch: Batch


class Skip(msgspec.Struct, frozen=True):
    """Every attempt in this tick has ended: a rank that has not begun it need not compute it, only pass it on.

    No rank need know what another one did: whatever the tick returns, the log says before that nobody wants it."""

    tick: int


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Output tokens of an attempt, from `position`."""

    key: Key
    position: int
    tokens: tuple[TokenOut, ...]


class End(msgspec.Struct, frozen=True):
    """The attempt's one outcome on this side."""

    key: Key
    outcome: Outcome


TOLD = (Reply, End)  # to the gateway, by rank 0
RoomEffect = OpenRoom | StartSender | SendDestinations | FirstToken | StopRoom | CloseRoom
HostEffect = CopyToHost | CopyFromHost | DropHostCopy
Effect = Relay | Acknowledge | Report | RoomEffect | HostEffect | Run | Skip | Reply | End
