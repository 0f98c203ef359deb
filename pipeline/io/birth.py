"""First code of every rank process: `python -m pipeline.io.birth DAEMON_PID RANK_MODULE`.

It ties the process's life to the daemon's and then becomes RANK_MODULE. The kernel kills the rank
when the daemon dies, however it dies, so that no rank outlives the process that answers for it: a
dead daemon's rank would still write KV into peers. This runs in the child after exec, not between
fork and exec, where a process with gRPC threads must not run Python.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """From now on this process is killed when process `parent`, its parent, ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call above and can no longer take us along
        os._exit(1)


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
