"""What strangers send: noise, damaged forms of what is right, lengths that are lies, halves, and one byte at a time.

In: chance from a seed. Out: byte strings by the protocol that a port speaks; each is wrong in more than one way, so
that no damage can make a request of it that must be served.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

from google.protobuf.message import Message

from paceline_proto.v1 import admin_pb2, bootstrap_pb2, common_pb2, generation_pb2
from tests.transfer.pools import pipeline
from transfer.io.stream.wire import HEAD, HELLO, MAGIC, VERSION
from transfer.messages import Destinations, Finished, Frame, Hello, Ping, Stop, Terms, encode
from transfer.regions import RegionTable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00"
Make = Callable[[random.Random], bytes]


def noise(chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice([0, 1, 3, 17, 64, 300, 2000]))


def damaged(chance: random.Random, good: bytes) -> bytes:
    """Bits flipped, bytes lost, doubled or cut off."""
    data = bytearray(good)
    for _ in range(chance.randint(1, 6)):
        if not data:
            break
        at = chance.randrange(len(data))
        match chance.randrange(5):
            case 0 | 1:
                data[at] ^= 1 << chance.randrange(8)
            case 2:
                del data[at : at + chance.randint(1, 8)]
            case 3:
                data[at:at] = data[at : at + chance.randint(1, 64)]
            case 4:
                del data[at:]
    return bytes(data)


def http(chance: random.Random) -> bytes:
    body = json.dumps(
        {"model": "none-of-this-name", "prompt": [99_999_999], "max_tokens": -1, "temperature": 9e99, "stop": [[1]]}
    ).encode()
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models/" + "x" * 300, "/health"])
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
    match chance.randrange(7):
        case 0:
            return noise(chance)
        case 1:
            return head + b"Content-Length: %d\r\n\r\n" % (1 << chance.randrange(70)) + body
        case 2:
            return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % chance.getrandbits(64) + body
        case 3:
            return head + b"X-Long: " + b"y" * chance.choice([100, 9000, 70_000])
        case 4:
            deep = b"[" * chance.choice([10, 10_000]) + body
            return head + b"Content-Length: %d\r\n\r\n" % len(deep) + deep
        case 5:
            wrong = damaged(chance, body)
            return head + b"Content-Length: %d\r\n\r\n" % len(wrong) + wrong
        case _:
            return damaged(chance, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def http2(chance: random.Random) -> bytes:
    frames = b""
    for _ in range(chance.randint(0, 8)):
        payload = noise(chance)
        length = chance.choice([len(payload), chance.getrandbits(24)])
        frames += struct.pack(">I", length)[1:] + chance.randbytes(2) + struct.pack(">I", chance.randrange(9)) + payload
    return damaged(chance, PREFACE + bytes(3) + b"\x04\x00" + bytes(4) + frames) if chance.randrange(3) else frames


def zmtp(chance: random.Random) -> bytes:
    """A greeting, perhaps a handshake, and frames whose lengths may be anything."""
    mechanism = chance.choice([b"NULL", b"CURVE", b"PLAIN", chance.randbytes(4)]).ljust(20, b"\0")
    greeting = ZMTP[:11] + b"\x01" + mechanism[:19] + bytes(33)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    huge = b"\x02" + struct.pack(">Q", chance.choice([1 << 62, 1 << 31, chance.getrandbits(64)])) + noise(chance)
    short = b"\x00" + bytes([chance.randrange(256)]) + noise(chance)
    whole = greeting + (ready if chance.randrange(2) else b"") + chance.choice([huge, short, noise(chance)])
    return damaged(chance, whole) if chance.randrange(2) else whole


def stream(chance: random.Random) -> bytes:
    hello = HELLO.pack(MAGIC, VERSION, chance.randbytes(16), chance.randbytes(16))
    head = HEAD.pack(MAGIC, 1, chance.getrandbits(16), 1, chance.getrandbits(32), chance.getrandbits(32))
    return chance.choice([noise(chance), hello, damaged(chance, hello), hello + head, head + noise(chance)])


def local(chance: random.Random) -> bytes:
    """For what listens on a path of this host."""
    return chance.choice([zmtp, stream, noise])(chance)


HELLO_OF_NOBODY = Hello(
    "nobody", Terms("m", "float32", "kv", "stream", "xxh3"), pipeline(1, 1), RegionTable((0, 1), (0, 1), 16, (64,), ((4096, 8192),)),
    b"", "127.0.0.1",
)  # fmt: skip


def link_frame(chance: random.Random) -> bytes:
    """Of the peer link, well formed or nearly; from an instance that there is not."""
    room = f"{chance.getrandbits(64):x}/0"
    body = chance.choice(
        [
            HELLO_OF_NOBODY,
            Destinations(room, 9, tuple(range(9))),
            Stop(room, "stop"),
            Ping(),
            Finished(room, 9, (0, 1), 9, 9, b"t"),
        ]
    )
    good = encode(Frame("stranger", chance.choice([1, 1 << 61]), chance.randrange(4), 7, chance.randrange(4), body))
    return chance.choice([good, damaged(chance, good), noise(chance)])


def _generate() -> generation_pb2.GenerateRequest:
    params = generation_pb2.SamplingParams(temperature=-1.0, top_p=7.0, max_tokens=0, min_tokens=9)
    return generation_pb2.GenerateRequest(request_id="\n" * 9, prompt_ids=[1 << 31], sampling=params, epoch=1 << 60)


GRPC: dict[str, Message] = {
    "/paceline.v1.Generation/Generate": _generate(),
    "/paceline.v1.Generation/Abort": generation_pb2.AbortRequest(request_id="r" * 300, attempt=7, reason="x" * 900),
    "/paceline.v1.Bootstrap/Describe": bootstrap_pb2.DescribeRequest(),
    "/paceline.v1.Admin/Status": admin_pb2.StatusRequest(),
    "/paceline.v1.Nothing/Nothing": common_pb2.InstanceRef(instance_id="x"),
}
