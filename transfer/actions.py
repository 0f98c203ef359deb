"""What the two sides ask of their shell: a closed union, nothing else leaves a side."""

from __future__ import annotations

from dataclasses import dataclass

from .extents import Extent, Span
from .messages import RoomMessage


@dataclass(frozen=True, slots=True, order=True)
class Peer:
    """One process: a rank of an incarnation of an instance."""

    instance: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Send:
    """To a peer that is not connected: drop it. The side says it again when the peer is back."""

    peer: Peer
    message: RoomMessage


@dataclass(frozen=True, slots=True)
class Submit:
    """Write these runs of these layers and heads into the peer's pool; `completed(handle)` must follow.

    `spans`: the same positions page by page, for their checksums; empty if none are wanted."""

    peer: Peer
    handle: int
    room: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    runs: tuple[Extent, ...]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Observe:
    """This rank saw the end of a stage. At most once per room and topic."""

    room: str
    topic: str  # prefill: bootstrap, transfer, release; decode: prealloc, transfer, release
    good: bool
    reason: str = ""
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Grant:
    """Peers may write into these pages of ours under the room's lease."""

    room: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """They may not any more; `revoked(room)` must follow once nothing can land."""

    room: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare what lies in our pool with these checksums; `verified(room, source, number, ...)` must follow."""

    room: str
    source: int
    number: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    spans: tuple[Span, ...]
    checksums: bytes


@dataclass(frozen=True, slots=True)
class NeedPeer:
    """Decode: no link to this prefill instance yet. Epoch 0: whichever answers."""

    instance: str
    epoch: int


SenderAction = Send | Submit | Observe
ReceiverAction = Send | Grant | Revoke | Verify | NeedPeer | Observe
