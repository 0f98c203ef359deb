"""The options of an instance whose ranks are on several hosts, and of its epochs, for `prefill` and `decode`.

In: the command line, or the environment where it says nothing: a pod template is the same for all hosts of a group, and
what differs comes from their fields. Out: fields of `DaemonConfig`.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from paceline.engine_options import ADDRESS, AT_LEAST_ONE, AT_LEAST_ZERO, PORT


def from_environment(name: str, otherwise: str) -> str:
    """The default of an option; argparse checks it as it checks what is typed."""
    return os.environ.get(name) or otherwise


def add_group_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several hosts", "the ranks of one instance, shared out to hosts or pods")
    group.add_argument(
        "--group-size", type=AT_LEAST_ONE, default=from_environment("PACELINE_GROUP_SIZE", "1"), metavar="N",
        help="hosts of this instance (default: $PACELINE_GROUP_SIZE or 1)",
    )  # fmt: skip
    group.add_argument(
        "--group-index", type=AT_LEAST_ZERO, default=from_environment("PACELINE_GROUP_INDEX", "0"), metavar="I",
        help="which of them this is; 0 leads, the others run ranks for it (default: $PACELINE_GROUP_INDEX or 0)",
    )  # fmt: skip
    group.add_argument(
        "--leader", type=ADDRESS, default=from_environment("PACELINE_LEADER", "") or None, metavar="HOST:PORT",
        help="where the leader listens, for the others (default: $PACELINE_LEADER)",
    )  # fmt: skip
    group.add_argument(
        "--ring-ports", type=PORT, default=7800, metavar="PORT",
        help="between hosts, rank r listens on four TCP ports from PORT + 4 r on (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--first-epoch", type=AT_LEAST_ONE, metavar="N",
        help="no epoch is below it (default: the seconds of the clock, so that epochs grow without the run directory)",
    )  # fmt: skip


def group_fields(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "group_size": options.group_size,
        "group_index": options.group_index,
        "leader": options.leader or "",
        "ring_ports": options.ring_ports,
        "first_epoch": options.first_epoch or int(time.time()),
    }
