"""Becomes a command that the kernel kills when its parent dies: `die_with_parent.py PARENT_PID COMMAND…`.

Run as a script between fork and exec, because a hook that runs Python code in a forked child of a
process with threads may hang. The setting survives exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the setting took effect; then no signal comes.
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
