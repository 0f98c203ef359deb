"""What the command and the processes that it starts tell each other, over a socket that keeps messages whole.

One question at a time, one answer each. Moments are of `time.monotonic()`, which is the same clock in all
processes of a host, so that a transfer may begin in one and end in the other.
"""

from __future__ import annotations

import socket

import msgspec

from .shape import Shape

LARGEST = 1 << 16


class Closed(Exception):
    """The other end is gone."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """First of all: be a member of this pair. The address is the sender's, known before the receiver starts."""

    backend: str
    shape: Shape
    host: str
    checksum: str
    address: str = ""


class Target(msgspec.Struct, frozen=True, tag=True):
    """To a sender: where its receiver's engine and pool are, for writes without ports."""

    endpoint: bytes
    base: int


class Prompt(msgspec.Struct, frozen=True, tag=True):
    """Hand over a prompt through the ports, in chunks of so many positions."""

    room: str
    tokens: int
    chunk: int


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Hand over a prompt while it is being computed: each layer of each chunk takes so long.

    KV is said to be written after each layer, after each chunk, or at the very end: "layer", "chunk", "end".
    The clock starts when the last chunk's forward ends."""

    room: str
    tokens: int
    chunk: int
    push: str
    layer_seconds: float


class Direct(msgspec.Struct, frozen=True, tag=True):
    """The same bytes without ports, by one of the methods that `Methods` named."""

    method: str
    tokens: int


class Poison(msgspec.Struct, frozen=True, tag=True):
    """Overwrite the destination."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Did the prompt arrive? `whole`: in one piece at the pool's beginning, as the TCP reference sends it."""

    tokens: int
    in_one_piece: bool


class ComputeStart(msgspec.Struct, frozen=True, tag=True):
    threads: int


class ComputeStop(msgspec.Struct, frozen=True, tag=True):
    pass


class Cpu(msgspec.Struct, frozen=True, tag=True):
    """How much processor time have you used so far?"""


Question = Begin | Target | Prompt | Prefill | Direct | Poison | Check | ComputeStart | ComputeStop | Cpu


class Up(msgspec.Struct, frozen=True, tag=True):
    """Started. A sender's address, or a receiver's endpoint and pool."""

    address: str = ""
    endpoint: bytes = b""
    base: int = 0


class Methods(msgspec.Struct, frozen=True, tag=True):
    names: list[str]


class Timed(msgspec.Struct, frozen=True, tag=True):
    """A side of a transfer: `began` is told by the sender, `ended` by whoever knows that all has landed."""

    began: float
    ended: float
    cpu: float  # processor seconds that this process used for it


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Checked(msgspec.Struct, frozen=True, tag=True):
    wrong: int


class Worked(msgspec.Struct, frozen=True, tag=True):
    per_second: float


class CpuSeconds(msgspec.Struct, frozen=True, tag=True):
    seconds: float


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The last word of a process. `missing`: the backend cannot be used here, which is no fault of the run."""

    reason: str
    missing: bool = False


Answer = Up | Methods | Timed | Done | Checked | Worked | CpuSeconds | Broken
Message = Question | Answer

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end. Not for two threads."""

    def __init__(self, ours: socket.socket) -> None:
        self.socket = ours

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(ours), theirs

    def send(self, message: Message) -> None:
        try:
            self.socket.send(_encoder.encode(message))
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, seconds: float | None = None) -> Message:
        """Raises `TimeoutError`, or `Closed`."""
        self.socket.settimeout(seconds)
        try:
            data = self.socket.recv(LARGEST)
        except ConnectionError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed("it closed the channel")
        return _decoder.decode(data)
