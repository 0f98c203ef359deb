"""A member's rank processes: started, told about, and ended together.

In: what the leader asks for. Out: processes, and messages about them. Invariant: ranks of one epoch at a time, each
epoch above all that this run folder has seen, and on disk before its first rank starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from paceline_proto.v1 import group_pb2
from pipeline.io.child import Child
from pipeline.io.control import RankConfig
from pipeline.io.run_folder import RunFolder, RunFolderError

log = logging.getLogger(__name__)

_REAP_PATIENCE_S = 60.0

Say = Callable[[group_pb2.AttendRequest], None]


class Unkillable(Exception):
    """A killed rank did not end: this member may not say that none is alive."""


class MemberRanks:
    def __init__(self, instance: str, module: str, secrets: str, folder: RunFolder, say: Say) -> None:
        """`secrets`: the folder on this host."""
        self._instance, self._module, self._secrets, self._folder, self._say = instance, module, secrets, folder, say
        self._children: dict[int, Child] = {}
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._children)

    def start(self, wanted: group_pb2.StartRank) -> None:
        try:
            config = msgspec.json.decode(wanted.config, type=RankConfig)
            self._check(wanted, config)
            config = msgspec.structs.replace(config, secrets=self._secrets)
            if not self._children:
                self._epoch = self._folder.next_epoch(wanted.epoch)
                self._folder.open_epoch(self._epoch)
            child = Child(self._module, config, self._folder.lock_fd, self._on_exit)
        except (ValueError, OSError, RunFolderError) as error:
            log.error("rank %d cannot be started: %s", wanted.rank, error)
            status = f"could not be started: {error}"
            self._say(group_pb2.AttendRequest(
                exited=group_pb2.RankExited(epoch=wanted.epoch, rank=wanted.rank, status=status)
            ))  # fmt: skip
            return
        self._children[config.rank] = child
        started = group_pb2.RankStarted(epoch=self._epoch, rank=config.rank, pid=child.pid)
        self._say(group_pb2.AttendRequest(started=started))

    def _check(self, wanted: group_pb2.StartRank, config: RankConfig) -> None:
        if (config.epoch, config.rank) != (wanted.epoch, wanted.rank) or config.instance != self._instance:
            raise ValueError(f"its configuration is that of {config.instance} epoch {config.epoch} rank {config.rank}")
        if config.rank in self._children or config.rank >= config.pp_size:
            raise ValueError(f"rank {config.rank} of {config.pp_size} runs already or does not exist")
        known = self._epoch if self._children else self._folder.last_epoch() + 1
        if wanted.epoch < known or (self._children and wanted.epoch != known):
            raise ValueError(f"epoch {wanted.epoch} is not the one that can start here, {known}")

    def kill(self) -> None:
        for child in self._children.values():
            child.kill()

    async def end(self) -> None:
        """Kills and reaps all of them. Raises `Unkillable`."""
        self.kill()
        for rank, child in self._children.items():
            if not await child.reap(_REAP_PATIENCE_S):
                raise Unkillable(f"rank {rank} (pid {child.pid}) did not end {_REAP_PATIENCE_S:g} s after SIGKILL")
        if self._children:
            self._children.clear()
            self._folder.close_epoch(self._epoch)

    def _on_exit(self, rank: int) -> None:
        child = self._children[rank]
        self._say(group_pb2.AttendRequest(exited=group_pb2.RankExited(
            epoch=self._epoch, rank=rank, status=child.exit_status(), killed=child.was_killed(),
            last_lines=list(child.last_lines),
        )))  # fmt: skip
