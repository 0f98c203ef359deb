"""The `Timeline` service of an instance: asks its ranks what they did, and says it on the wire.

In: a question from an operator. Out: one message per rank that answered within the patience of a status question.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from paceline_proto.v1 import common_pb2, timeline_pb2, timeline_pb2_grpc
from pipeline.io.admin import ROLES
from pipeline.io.supervisor import Supervisor
from pipeline.io.timeline import RankTimeline

ALL_S = 1e9


class TimelineService(timeline_pb2_grpc.TimelineServicer):
    def __init__(self, supervisor: Supervisor, ref: Callable[[], common_pb2.InstanceRef]) -> None:
        self._supervisor, self._ref = supervisor, ref

    async def Read(
        self, request: timeline_pb2.TimelineReadRequest, context: Any
    ) -> AsyncIterator[timeline_pb2.TimelineReadResponse]:
        current = self._supervisor.incarnation
        if current is None:
            return
        seconds = request.seconds if 0 < request.seconds < ALL_S else ALL_S
        role = ROLES[self._supervisor.config.role]
        for rank, told in sorted((await current.ask_timeline(seconds)).items()):
            yield _on_wire(self._ref(), role, rank, told)


def _on_wire(
    instance: common_pb2.InstanceRef, role: common_pb2.Role.ValueType, rank: int, told: RankTimeline
) -> timeline_pb2.TimelineReadResponse:
    return timeline_pb2.TimelineReadResponse(
        instance=instance,
        role=role,
        rank=rank,
        wall_offset_us=told.wall_offset,
        now_us=told.now,
        ticks=[
            timeline_pb2.TickTimes(
                tick=t.tick, slot=t.slot, rows=t.rows, tokens=t.tokens, request_id=t.request, start=t.start,
                launched_us=t.launched, began_us=t.began, fed_us=t.fed, ended_us=t.ended, harvested_us=t.harvested,
            )
            for t in told.ticks
        ],
        entries=[
            timeline_pb2.EntryTimes(
                seq=e.seq, clock_us=e.clock, applied_us=e.applied, inputs=e.inputs, ballots=e.ballots, launch=e.launch
            )
            for e in told.entries
        ],
        hand_overs=[
            timeline_pb2.HandOverTimes(room=h.room, began_us=h.began, ended_us=h.ended, good=h.good)
            for h in told.hand_overs
        ],
    )  # fmt: skip
