"""What `stream` engines say to each other: the endpoint, the greeting, frames, verdicts.

In: bytes of a peer. Out: their fields, all within bounds, or `Malformed`. Numbers are little-endian.

A connection belongs to the side that sends KV. It greets with the incarnation of the engine that it means
and is welcomed or refused. Where the cluster has secrets it is first challenged, and each side proves to the
other that it knows them (`prove`), by nonces of both; the payload itself is not encrypted. Then it sends
frames: head, lease, table of (address, bytes), and the payload, at most `FRAME_BYTES`. The frames of a handle
(`sequence`) follow each other, the last one says so, and the receiver answers each sequence with one verdict:
landed, or refused for a reason. After a refusal, which may come early, the rest of that handle's frames need
not be sent, and land nowhere.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import struct
from pathlib import Path
from typing import Annotated

import msgspec
import numpy

from .iovec import Ranges

VERSION = 2
MAGIC = b"pKVs"
INCARNATION_BYTES = NONCE_BYTES = 16
FRAME_BYTES = 4 << 20  # at 1 MiB the CPU per byte is a quarter more; a revoke cuts through one
FRAME_PIECES = 1000  # with the frame's head fewer than the 1024 that the kernel takes at once
MAX_LEASE = 512
MAX_REASON = 400
MAX_ENDPOINT = 1024

HELLO = struct.Struct("<4sHxx16s16s")  # magic, version, incarnation meant, nonce
WELCOME = struct.Struct("<4sHH")  # magic, version, one of the five below
WELCOMED, OTHER_VERSION, OTHER_INCARNATION, FULL, CHALLENGED = range(5)
CHALLENGE = struct.Struct("<16s32s")  # after CHALLENGED: nonce of the target, its proof; answered by one of the source
PROOF_BYTES = 32
BY_TARGET, BY_SOURCE = b"target", b"source"
HEAD = struct.Struct("<4sHHQII")  # magic, last, bytes of the lease, sequence, pieces, bytes of the payload
VERDICT = struct.Struct("<QHH")  # sequence, refused, bytes of the reason
MAX_TAIL = MAX_LEASE + 16 * FRAME_PIECES


def prove(key: bytes, by: bytes, hello: bytes, nonce: bytes) -> bytes:
    """That whoever sends it knows the key, and answers this greeting and this nonce."""
    return hmac.digest(key, b"paceline stream " + by + hello + nonce, "sha256")


class Malformed(ValueError):
    """Not what a `stream` engine says; nothing that follows on this connection can be trusted."""


Incarnation = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """How to reach an engine. `memory` names the socket that hands out its shared memory on its host, if any."""

    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]
    incarnation: Incarnation
    boot: Annotated[str, msgspec.Meta(max_length=64)]
    memory: Annotated[str, msgspec.Meta(pattern="^([a-z0-9-]{1,100})?$")]


PREFIX = b"stream/1 "
_endpoints = msgspec.json.Decoder(Endpoint)


def encode_endpoint(endpoint: Endpoint) -> bytes:
    return PREFIX + msgspec.json.encode(endpoint)


def decode_endpoint(data: bytes) -> Endpoint:
    """Raises `Malformed`."""
    if len(data) > MAX_ENDPOINT or not data.startswith(PREFIX):
        raise Malformed("the peer's endpoint is not one of this backend and version")
    try:
        endpoint = _endpoints.decode(data[len(PREFIX) :])
        ipaddress.ip_address(endpoint.host)
    except ValueError as error:  # msgspec's errors are ones
        raise Malformed(f"the peer's endpoint is malformed: {error}") from None
    return endpoint


def boot_id() -> str:
    """Of this host since it started; "" if it cannot be known, and then no other process is on the same one."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:64]
    return ""


class Head(msgspec.Struct, frozen=True):
    """A frame's. What follows are `lease` bytes, the table of `pieces`, and `payload` bytes."""

    last: bool
    lease: int
    sequence: int
    pieces: int
    payload: int

    @property
    def tail(self) -> int:
        return self.lease + 16 * self.pieces


def read_head(buffer: bytearray) -> Head:
    magic, last, lease, sequence, pieces, payload = HEAD.unpack_from(buffer)
    if magic != MAGIC or last > 1:
        raise Malformed("no frame")
    if not (1 <= lease <= MAX_LEASE and 1 <= pieces <= FRAME_PIECES and pieces <= payload <= FRAME_BYTES):
        raise Malformed(f"a frame of {payload} bytes in {pieces} pieces under a lease of {lease} bytes")
    return Head(last == 1, lease, sequence, pieces, payload)


def read_tail(buffer: bytearray, head: Head) -> tuple[bytes, Ranges]:
    """The lease, and the table as a copy; its lengths fit the payload, its addresses are anything."""
    table = numpy.frombuffer(buffer, dtype="<u8", count=2 * head.pieces, offset=head.lease).reshape(-1, 2)
    table = table.astype(numpy.uint64)
    lengths = table[:, 1]
    # Each bounded first, so that the sum cannot wrap.
    if int(lengths.min()) < 1 or int(lengths.max()) > head.payload or int(lengths.sum()) != head.payload:
        raise Malformed("a frame whose pieces do not make up its payload")
    return bytes(buffer[: head.lease]), table


def write_frame(buffer: bytearray, last: bool, lease: bytes, sequence: int, table: Ranges) -> int:
    """Head, lease and table to the front of `buffer`; the number of bytes."""
    HEAD.pack_into(buffer, 0, MAGIC, last, len(lease), sequence, len(table), int(table[:, 1].sum()))
    middle, end = HEAD.size + len(lease), HEAD.size + len(lease) + 16 * len(table)
    buffer[HEAD.size : middle] = lease
    buffer[middle:end] = table.astype("<u8").tobytes()
    return end


def verdict(sequence: int, reason: str | None) -> bytes:
    """Landed, or refused."""
    text = (reason or "").encode()[:MAX_REASON]
    return VERDICT.pack(sequence, reason is not None, len(text)) + text


def take_verdicts(buffer: bytearray) -> list[tuple[int, str | None]]:
    """All that are complete, off the front of `buffer`: (sequence, reason of a refusal)."""
    taken: list[tuple[int, str | None]] = []
    at = 0
    while len(buffer) - at >= VERDICT.size:
        sequence, refused, length = VERDICT.unpack_from(buffer, at)
        if refused > 1 or length > MAX_REASON or (length and not refused):
            raise Malformed("no verdict")
        end = at + VERDICT.size + length
        if len(buffer) < end:
            break
        text = buffer[at + VERDICT.size : end].decode(errors="replace")
        taken.append((sequence, text if refused else None))
        at = end
    del buffer[:at]
    return taken
