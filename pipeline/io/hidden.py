"""The hidden-state channel: rank k's executor → rank k+1's executor, one tensor per tick.

In the model dtype, so that the split changes no bit. A frame is a small header and the raw bytes. Between hosts the
channel is encrypted and only the previous rank is heard. Each end is used by its executor thread alone; the
receiver waits for exactly the tick it runs, with a deadline, and treats anything else as a broken pipeline.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
import zmq

from pipeline.io.zap import RingKeys, crosses_hosts

SLICE_MS = 200  # between looks at the stop flag while waiting
_LARGEST_ROW = 1 << 17  # bytes of one token's hidden state: 32 768 of float32


class Header(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    tick: int
    rows: int
    width: int
    dtype: str


class HiddenLost(Exception):
    """The tensor of a tick did not come in time, or was not the one expected."""


class HiddenSender:
    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, epoch: int, keys: RingKeys, reader: int
    ) -> None:
        """`reader` is the rank at the other end."""
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        if crosses_hosts(endpoint):
            keys.dial(self._socket, reader)
        self._socket.connect(endpoint)
        self._epoch = epoch

    def send(self, tick: int, hidden: torch.Tensor, timeout: float) -> None:
        """`hidden` is [tokens, width]. Waits at most `timeout` seconds for room in the channel."""
        rows, width = hidden.shape
        header = Header(self._epoch, tick, rows, width, str(hidden.dtype).removeprefix("torch."))
        # numpy has no bfloat16; the bytes are the same under any type.
        body = hidden.contiguous().view(torch.uint8).numpy().data
        if not self._socket.poll(int(timeout * 1000), zmq.POLLOUT):
            raise HiddenLost(f"the next rank did not take the hidden states of tick {tick} for {timeout:g} s")
        self._socket.send_multipart([msgspec.msgpack.encode(header), body], copy=False)


class HiddenReceiver:
    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, epoch: int, keys: RingKeys, writer: int,
        most_tokens: int,
    ) -> None:  # fmt: skip
        """`writer` is the rank at the other end, `most_tokens` what a tick can have."""
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, most_tokens * _LARGEST_ROW)
        self._only = ""  # who is heard, where others can try
        if crosses_hosts(endpoint):
            self._only = str(writer)
            keys.serve(self._socket)
        self._socket.bind(endpoint)
        self._epoch = epoch
        self.dropped = 0  # frames of another epoch, of another rank, or malformed

    def receive(self, tick: int, tokens: int, timeout: float) -> torch.Tensor:
        """[tokens, width] of exactly `tick`. Raises `HiddenLost` after `timeout` seconds or on another tick."""
        waited = 0.0
        while waited < timeout:
            if not self._socket.poll(SLICE_MS):
                waited += SLICE_MS / 1000
                continue
            tensor = self._take(tick, tokens)
            if tensor is not None:
                return tensor
        raise HiddenLost(f"no hidden states of tick {tick} from the previous rank for {timeout:g} s")

    def _take(self, tick: int, tokens: int) -> torch.Tensor | None:
        parts = self._socket.recv_multipart(copy=False)
        if self._only and parts[0].get("User-Id") != self._only:
            self.dropped += 1
            return None
        try:
            header = msgspec.msgpack.decode(parts[0].buffer, type=Header)
        except msgspec.DecodeError:
            self.dropped += 1
            return None
        if header.epoch != self._epoch or len(parts) != 2:
            self.dropped += 1
            return None
        if header.tick != tick or header.rows != tokens:
            raise HiddenLost(f"expected tick {tick} with {tokens} tokens, got tick {header.tick} with {header.rows}")
        dtype: torch.dtype = getattr(torch, header.dtype)
        if len(parts[1].buffer) != header.rows * header.width * dtype.itemsize:
            raise HiddenLost(f"tick {tick}: {len(parts[1].buffer)} bytes are not {header.rows}×{header.width} {dtype}")
        if not header.width:  # the rank before skipped the tick
            return torch.empty((header.rows, 0), dtype=dtype)
        # A copy: the frame's buffer is read-only and its alignment is ZMQ's business.
        return torch.from_numpy(np.array(parts[1].buffer, dtype=np.uint8)).view(dtype).view(header.rows, header.width)
