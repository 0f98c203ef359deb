"""How long each phase of an attempt took, up to a message about it.

In: when its call arrived, the stages rank 0 told, the moment of the message; all in µs of this host's
monotonic clock, which the daemon and rank 0 share. Out: the wire's `Phase`s, in order. Invariant: they add up to
the time between arrival and message, so whoever called knows that all else was the way there and back.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline_proto.v1 import generation_pb2
from pipeline.phases import Stages

QUEUE = "queue"  # in the daemon, on its way to rank 0, and before the log


def intervals(arrived: int, stages: Stages, now: int) -> Iterator[tuple[str, int, int]]:
    """(phase, begin, end) of every phase that took time; none if rank 0 has told nothing."""
    if not stages:
        return
    begins = [(QUEUE, arrived), *stages]
    for (phase, begin), end in zip(begins, [*(begin for _, begin in stages), now], strict=True):
        if end > begin:
            yield phase, begin, end


def phases(arrived: int, stages: Stages, now: int) -> list[generation_pb2.Phase]:
    """A phase that came more than once (a request retracted twice) is one."""
    total: dict[str, int] = {}
    for phase, begin, end in intervals(arrived, stages, now):
        total[phase] = total.get(phase, 0) + end - begin
    return [generation_pb2.Phase(name=phase, seconds=us / 1e6) for phase, us in total.items()]
