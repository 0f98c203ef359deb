"""What travels on the link between one decode rank (it dials) and one prefill rank (it listens).

In: bytes from a socket. Out: a `Frame` whose body is one of the messages below, or a
`FrameError` with a reason; no byte string does anything else. Sizes are bounded.
Every frame names its sender's incarnation, the link (one connection attempt) and its
number on that link, so another incarnation's messages can be dropped and a loss noticed.
A room is "<request>/<attempt>", unique for ever.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .plan import Topology
from .regions import RegionTable

PROTOCOL_VERSION = 3
MAX_FRAME = 4 << 20

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Reason = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]
Pages = Annotated[tuple[Annotated[int, Meta(ge=0, le=(1 << 40))], ...], Meta(max_length=1 << 18)]
Endpoint = Annotated[bytes, Meta(max_length=1 << 16)]  # libraries need hundreds of bytes
Token = Annotated[bytes, Meta(max_length=64)]
Payload = Annotated[bytes, Meta(max_length=1 << 20)]


class Terms(msgspec.Struct, frozen=True):
    """What two ranks must agree on before a byte of KV moves."""

    model: Name  # digest of config, tokenizer and weights
    kv_dtype: Name
    cache: Name  # "kv", or the kind of a single-buffer cache
    backend: Name
    checksum: Name  # "xxh3", or "none"
    version: int = PROTOCOL_VERSION


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Decode rank to prefill rank, first on a link: whom I want, what I am, where my KV lies."""

    instance: Name  # whichever incarnation of it answers; its Welcome says which
    terms: Terms
    topology: Topology
    regions: RegionTable
    endpoint: Endpoint  # the transfer engine's, opaque here
    host: Name


class Welcome(msgspec.Struct, frozen=True, tag=True):
    topology: Topology


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: Reason


class Reset(msgspec.Struct, frozen=True, tag=True):
    """I do not know this link (any more), or a frame of it got lost: dial again."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    pass


class Pong(msgspec.Struct, frozen=True, tag=True):
    pass


class Destinations(msgspec.Struct, frozen=True, tag=True):
    """The pages of mine that hold the room's prompt of `tokens` positions. `token` shows that the room is mine."""

    room: Name
    tokens: Count
    pages: Pages
    token: Token = b""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Write no more for this room, and say `Stopped` when nothing can land any more."""

    room: Name
    reason: Reason
    token: Token = b""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """A fence: no write of mine for this room can land any more. Each has ended well, or never began, or
    its engine is destroyed and what the kernel still held of it has drained; and there will be no other."""

    room: Name


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The room will not be completed. Not a fence."""

    room: Name
    reason: Reason


class Slice(msgspec.Struct, frozen=True, tag=True):
    """These layers of these positions have landed, says the engine. Numbered per room and target, from 0."""

    room: Name
    number: Count
    layers: tuple[Count, Count]
    start: Count
    end: Count
    checksums: Annotated[bytes, Meta(max_length=1 << 21)] = b""  # see `transfer.io.checksums`; empty if there are none
    instead_of: Count | None = None  # the slice that had arrived damaged


class Again(msgspec.Struct, frozen=True, tag=True):
    """That slice does not match its checksums: write it once more."""

    room: Name
    number: Count


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All of the room's KV that I owe you has landed. Also a fence, unless I was asked for a slice again since."""

    room: Name
    tokens: Count
    layers: tuple[Count, Count]
    nbytes: Count
    slices: Count  # it took, those sent again included
    first_token: Payload | None = None  # from the sampler to decode rank 0
    again: Count = 0  # of the slices, those that were asked for again


class FinishedAck(msgspec.Struct, frozen=True, tag=True):
    room: Name


RoomMessage = Destinations | Stop | Stopped | Failed | Slice | Again | Finished | FinishedAck
Message = Hello | Welcome | Refused | Reset | Ping | Pong | RoomMessage


class Frame(msgspec.Struct, frozen=True, array_like=True):
    instance: Name
    epoch: Annotated[int, Meta(ge=1, le=(1 << 62))]
    rank: Annotated[int, Meta(ge=0, le=1 << 16)]
    link: Count
    number: Count
    body: Message


class FrameError(ValueError):
    """Bytes that are not a frame of ours."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """Raises `FrameError` for a frame that the other side would refuse for its size."""
    data = _encoder.encode(frame)
    if len(data) > MAX_FRAME:
        raise FrameError(f"a frame of {len(data)} bytes is over the bound of {MAX_FRAME}")
    return data


def decode(data: bytes) -> Frame:
    if len(data) > MAX_FRAME:
        raise FrameError(f"a frame of {len(data)} bytes is over the bound of {MAX_FRAME}")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValidationError is a DecodeError
        raise FrameError(str(error)[:200]) from error
