"""The folder an instance owns on its host: its lock, its epoch number and its ranks' sockets.

In: a path. Out: epochs that only grow, and one private folder of sockets per epoch. Invariants: at
most one daemon uses the folder; a new daemon waits until the *ranks* of the one before are gone too,
because they hold the same lock; an epoch is on disk before anything runs under it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

_LONGEST_PATH = 100  # of a socket; the kernel's limit is 107
_LONGEST_NAME = len("/e9999999999/returns")
_LOCK_PATIENCE_S = 5.0


class RunFolderError(Exception):
    """The folder cannot be used; the message says why."""


class RunFolder:
    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        if len(str(self.path)) + _LONGEST_NAME > _LONGEST_PATH:
            raise RunFolderError(
                f"run_dir {self.path} has {len(str(self.path))} characters; sockets live below it and their paths are "
                f"limited, so it may have {_LONGEST_PATH - _LONGEST_NAME}"
            )
        self.dumps = self.path / "dumps"
        self.lock_fd = -1

    def take(self) -> None:
        """Makes the folder ours until every process that inherits `lock_fd` has ended. Raises `RunFolderError`."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.dumps.mkdir(mode=0o700, exist_ok=True)
            self.lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunFolderError(f"run_dir {self.path} cannot be written: {error}") from None
        deadline = time.monotonic() + _LOCK_PATIENCE_S  # the kernel may still be ending a killed daemon's ranks
        while True:
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.release()
                    raise RunFolderError(f"run_dir {self.path} is in use by another daemon or its ranks") from None
                time.sleep(0.05)
        for left_over in self.path.glob("e[0-9]*"):
            shutil.rmtree(left_over, ignore_errors=True)

    def release(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1

    def last_epoch(self) -> int:
        """The last number given out here; 0: none. Raises `RunFolderError`."""
        file = self.path / "epoch"
        try:
            text = file.read_text() if file.exists() else "0"
        except OSError as error:
            raise RunFolderError(f"the epoch cannot be read from {file}: {error}") from None
        if not text.strip().isdigit():
            raise RunFolderError(f"{file} holds {text[:40]!r}, not a number; restore it or remove it")
        return int(text)

    def next_epoch(self, at_least: int) -> int:
        """A number above every one this folder has seen. Raises `RunFolderError`."""
        file = self.path / "epoch"
        epoch = max(self.last_epoch() + 1, at_least, 1)
        try:
            fresh = self.path / "epoch.new"
            with fresh.open("w") as out:
                out.write(f"{epoch}\n")
                out.flush()
                os.fsync(out.fileno())
            fresh.replace(file)
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise RunFolderError(f"the epoch cannot be written to {file}: {error}") from None
        return epoch

    def open_epoch(self, epoch: int) -> Path:
        """A fresh folder, private to this user, for the sockets of `epoch`."""
        folder = self.path / f"e{epoch}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def close_epoch(self, epoch: int) -> None:
        shutil.rmtree(self.path / f"e{epoch}", ignore_errors=True)
