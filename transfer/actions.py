"""What the two sides ask of their shell: a closed union, nothing else leaves a side."""

from __future__ import annotations

from dataclasses import dataclass

from .extents import Extent
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
    """Write these runs of these layers and heads into the peer's pool; `completed(handle)` must follow."""

    peer: Peer
    handle: int
    room: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    runs: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Observe:
    """This rank saw the end of a stage. At most once per room and topic."""

    room: str
    topic: str  # prefill: bootstrap, transfer, release; decode: prealloc, transfer, release
    good: bool
    reason: str = ""
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class NeedPeer:
    """Decode: no link to this prefill instance yet. Epoch 0: whichever answers."""

    instance: str
    epoch: int


SenderAction = Send | Submit | Observe
ReceiverAction = Send | NeedPeer | Observe
