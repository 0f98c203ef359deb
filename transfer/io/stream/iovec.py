"""Ranges of memory that a socket fills or drains, without a Python object for each.

In: addresses and lengths, as an array. Out: bytes moved between a socket and exactly those ranges.

An array of (address, length) pairs of 64 bits *is* the kernel's array of iovecs, so it is handed over
as it is; a prompt's pages may be thousands of small ranges.
Invariant: never past the end of the ranges. That they are ours is the caller's business.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy
from numpy.typing import NDArray

Ranges = NDArray[numpy.uint64]  # rows of (address, bytes), dense

IOV_MAX = 1024
MSG_NOSIGNAL = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_readv, _sendmsg = _libc.readv, _libc.sendmsg
_readv.argtypes, _readv.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int), ctypes.c_ssize_t
_sendmsg.argtypes, _sendmsg.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int), ctypes.c_ssize_t


class _Message(ctypes.Structure):
    """`struct msghdr`."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("ranges", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


def address_of(buffer: bytearray) -> int:
    """Valid as long as the buffer lives and keeps its size."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def one_range(address: int, nbytes: int) -> Ranges:
    return numpy.array(((address, nbytes),), dtype=numpy.uint64)


class Iovec:
    """Consumed from its front; the array is its own from now on."""

    __slots__ = ("_at", "_base", "_ranges", "remaining")

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._base = ranges.ctypes.data
        self._at = 0
        self.remaining = int(ranges[:, 1].sum())

    def receive(self, fd: int) -> int | None:
        """Bytes received; 0 at the end of the stream; None if there is nothing now. Raises `OSError`."""
        return self._moved(_readv(fd, self._base + 16 * self._at, min(len(self._ranges) - self._at, IOV_MAX)))

    def send(self, fd: int) -> int | None:
        """Bytes taken; None if there is no room now. Raises `OSError`."""
        count = min(len(self._ranges) - self._at, IOV_MAX)
        message = _Message(None, 0, self._base + 16 * self._at, count, None, 0, 0)
        return self._moved(_sendmsg(fd, ctypes.addressof(message), MSG_NOSIGNAL))

    def _moved(self, count: int) -> int | None:
        if count < 0:
            code = ctypes.get_errno()
            if code in (errno.EAGAIN, errno.EINTR):
                return None
            raise OSError(code, os.strerror(code))
        self.remaining -= count
        if self.remaining:
            self._skip(count)
        return count

    def _skip(self, count: int) -> None:
        ends = self._ranges[self._at :, 1].cumsum()
        whole = int(ends.searchsorted(numpy.uint64(count), side="right"))
        if whole:
            count -= int(ends[whole - 1])
            self._at += whole
        self._ranges[self._at, 0] += numpy.uint64(count)
        self._ranges[self._at, 1] -= numpy.uint64(count)
