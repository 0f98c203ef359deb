"""The table that fences copies through shared memory: a file of slots, one per lease.

In, at the target: leases to admit and to fence. In, at a sender: a slot and the nonce it was told.
Out: whether a copy may begin; whether none is under way any more.

A sender copies a piece at a time, and around each it holds a read lock on the slot's bytes, under which it
looks whether the slot still holds the lease's nonce. The target clears the nonce and then needs the write
lock: having got it once, it knows that no copy is under way and that none will begin. The kernel gives a
dead sender's lock back; a stopped one in mid copy keeps it, and the target must wait, or see it dead.

The locks are of the open file description, so each side opens the file for itself. The order between the
nonce and the copied bytes is that of the locking system calls. Descriptors are closed on exec; a fork
without exec would keep a dead sender's lock alive, and this code's processes do not fork so.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
from collections import deque

SLOT = 16  # bytes, of a nonce
SLOTS = 1 << 16
FREE = bytes(SLOT)

_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, process (must be 0)


def _lock(fd: int, kind: int, slot: int, slots: int = 1) -> bool:
    """False: someone else's lock is in the way, or the kernel has no room for another."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot * SLOT, slots * SLOT, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.ENOLCK, errno.ENOMEM):
            return False
        raise
    return True


class LeaseTable:
    """The target's end."""

    def __init__(self) -> None:
        """Raises `OSError` where the system has no such files or no such locks."""
        self.fd = os.memfd_create("paceline-leases", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, SLOT * SLOTS)
            seal(self.fd)
            # Found out here, for a fence that fails later would keep its pages for ever.
            if not _lock(self.fd, fcntl.F_WRLCK, 0):
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            _lock(self.fd, fcntl.F_UNLCK, 0)
            self._slots = mmap.mmap(self.fd, SLOT * SLOTS)
        except BaseException:
            os.close(self.fd)
            raise
        self._unused = iter(range(SLOTS))
        self._fenced: deque[int] = deque()

    def admit(self) -> tuple[int, bytes] | None:
        """A slot and its nonce; None if all are taken."""
        slot = self._fenced.popleft() if self._fenced else next(self._unused, None)
        if slot is None:
            return None
        nonce = secrets.token_bytes(SLOT)
        self._slots[slot * SLOT : (slot + 1) * SLOT] = nonce
        return slot, nonce

    def revoke(self, slot: int) -> None:
        """No copy begins under it any more."""
        self._slots[slot * SLOT : (slot + 1) * SLOT] = FREE

    def fence(self, slot: int) -> bool:
        """Whether a revoked slot is without a copy under way, and so is free again. If not, ask later."""
        if not _lock(self.fd, fcntl.F_WRLCK, slot):
            return False
        _lock(self.fd, fcntl.F_UNLCK, slot)
        self._fenced.append(slot)
        return True

    def revoke_all(self) -> None:
        self._slots[:] = bytes(SLOT * SLOTS)

    def quiet(self) -> bool:
        """After `revoke_all`: whether no copy is under way anywhere."""
        return _lock(self.fd, fcntl.F_WRLCK, 0, SLOTS)

    def close(self) -> None:
        self._slots.close()
        os.close(self.fd)


class LeaseTableView:
    """A sender's end."""

    def __init__(self, fd: int) -> None:
        """Opens the file anew; `fd` stays the caller's. Raises `OSError` if it is no such table, or may not be."""
        require_sealed(fd, SLOT * SLOTS)
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._slots = mmap.mmap(self._fd, SLOT * SLOTS, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise

    def enter(self, slot: int, nonce: bytes) -> bool:
        """Whether a copy under that lease may begin; it must be short, and `leave` must follow."""
        if not _lock(self._fd, fcntl.F_RDLCK, slot):
            return False  # its target is fencing it
        if self._slots[slot * SLOT : (slot + 1) * SLOT] == nonce:
            return True
        self.leave(slot)
        return False

    def leave(self, slot: int) -> None:
        _lock(self._fd, fcntl.F_UNLCK, slot)

    def close(self) -> None:
        self._slots.close()
        os.close(self._fd)


def seal(fd: int) -> None:
    """Nobody can make the file shorter, which would kill those who have mapped it. Raises `OSError`."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


def require_sealed(fd: int, nbytes: int) -> None:
    """Raises `OSError` unless `nbytes` of the file will stay there."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < nbytes:
        raise OSError(errno.EPERM, "what the peer shares may shrink, or is too short")
