"""What the ranks of a cluster on this machine did meanwhile, as they tell it themselves.

In: the cluster's run directory, a moment of this host's monotonic clock in µs. Out: a `RankTimes` for every rank that
answers, of what was launched since. Ranks keep their last few thousand microbatches; `lost` says that some are missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline_proto.v1 import common_pb2, timeline_pb2, timeline_pb2_grpc
from security.channels import dial_blocking
from security.secrets import Secrets
from telemetry.intervals import length, uncovered, union, within

TIMEOUT = 10.0
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20))
_ROLES = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_DECODE: "decode"}


class ClusterError(Exception):
    """An instance does not tell; the message says which and why."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    instance: str
    role: str
    rank: int
    ticks: Sequence[timeline_pb2.TickTimes]  # in order
    entries: Sequence[timeline_pb2.EntryTimes]
    lost: bool


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds of one rank between two moments. `in_flight`: at least one microbatch was launched and its result was
    not in the log yet. `computing`: a forward ran. `waiting`: the rest of `in_flight` in which the executor had a
    microbatch and waited for the rank before it. `empty`: what remains, when the executor had nothing to do."""

    in_flight: float
    computing: float
    waiting: float
    empty: float

    @property
    def bubble_fraction(self) -> float:
        return (self.waiting + self.empty) / self.in_flight if self.in_flight else 0.0


def now_us() -> int:
    """The clock that ranks on this host tell their moments in."""
    return time.monotonic_ns() // 1000


def read_times(run_dir: Path, since: int, secrets: Secrets | None = None) -> list[RankTimes]:
    parts = json.loads((run_dir / "cluster.json").read_text())["parts"]
    addresses = [part["address"] for part in parts if part["role"] != "gateway"]
    return [times for address in addresses for times in _ask(address, since, secrets)]


def _ask(address: str, since: int, secrets: Secrets | None) -> Iterator[RankTimes]:
    everything = timeline_pb2.TimelineReadRequest()
    try:
        with dial_blocking(address, secrets, OPTIONS) as channel:
            answers = list(timeline_pb2_grpc.TimelineStub(channel).Read(everything, timeout=TIMEOUT))
    except grpc.RpcError as error:
        raise ClusterError(f"the instance at {address} does not tell its timeline: {error.details()}") from error
    for told in answers:
        ticks = [tick for tick in told.ticks if tick.launched_us >= since]
        entries = [entry for entry in told.entries if entry.applied_us >= since]
        # Ticks are numbered from 1, and the oldest made room.
        lost = len(told.ticks) == len(ticks) and bool(ticks) and ticks[0].tick > 1
        yield RankTimes(told.instance.instance_id, _ROLES.get(told.role, "?"), told.rank, ticks, entries, lost)


def busy(times: RankTimes, begin: int, end: int) -> Busy:
    """Of the microbatches that are over."""
    over = [tick for tick in times.ticks if tick.ended_us and tick.harvested_us]
    in_flight = within(union((tick.launched_us, tick.harvested_us) for tick in over), begin, end)
    computing = union((tick.fed_us, tick.ended_us) for tick in over)
    idle = uncovered(in_flight, computing)
    waiting = length(idle) - length(uncovered(idle, union((tick.began_us, tick.fed_us) for tick in over)))
    whole, nothing = length(in_flight), length(idle)
    return Busy(whole / 1e6, (whole - nothing) / 1e6, waiting / 1e6, (nothing - waiting) / 1e6)
