"""Sends a plan to a server, as a closed or an open loop, and keeps a record of each request.

Open loop: every request has its moment, and is sent then, whatever became of those before it. Its latencies count from
that moment, also if it was sent late: because this process was busy, or because `most` requests were out already. A
client that waits for answers before it asks again would hide exactly the waiting that a slow server causes
(coordinated omission). Closed loop: `users` of which each asks again when it has its answer; there is no schedule, so
nothing can be late, and the rate is an outcome. The clock is the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from bench.client import Exchange
from bench.records import Record
from bench.workload import Planned

Send = Callable[[bytes], Awaitable[Exchange]]


@dataclass(slots=True)
class Progress:
    """What is known while a run goes on; for people."""

    planned: int
    sent: int = 0
    records: list[Record] = field(default_factory=list)
    errors: int = 0
    tokens: int = 0

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.errors += not record.ok
        self.tokens += record.output_tokens


class Load:
    """`bodies[i]` belongs to `plan[i]`."""

    def __init__(self, send: Send, plan: Sequence[Planned], bodies: Sequence[bytes]) -> None:
        self._send, self._plan, self._bodies = send, plan, bodies
        self._clock = asyncio.get_running_loop().time
        self._start = 0.0
        self.progress = Progress(len(plan))

    async def open_loop(self, most: int | None = None) -> list[Record]:
        room = asyncio.Semaphore(most) if most is not None else None
        self._start = self._clock()
        async with asyncio.TaskGroup() as group:
            for planned, body in zip(self._plan, self._bodies, strict=True):
                await asyncio.sleep(max(0.0, self._start + planned.due - self._clock()))
                group.create_task(self._one(planned, body, planned.due, room))
        return self._sorted()

    async def closed_loop(self, users: int, seconds: float | None = None) -> list[Record]:
        """Until the plan is used up, or no request is begun any more because `seconds` have passed."""
        waiting = iter(zip(self._plan, self._bodies, strict=True))
        self._start = self._clock()

        async def user() -> None:
            for planned, body in waiting:
                now = self._clock() - self._start
                if seconds is not None and now >= seconds:
                    return
                await self._one(planned, body, now, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(users, len(self._plan))):
                group.create_task(user())
        return self._sorted()

    async def _one(self, planned: Planned, body: bytes, scheduled: float, room: asyncio.Semaphore | None) -> None:
        if room is not None:
            async with room:
                exchange = await self._sent(body)
        else:
            exchange = await self._sent(body)
        answer, start = exchange.answer, self._start
        self.progress.add(
            Record(
                index=planned.index,
                scheduled=scheduled,
                sent=exchange.sent - start,
                ended=exchange.ended - start,
                chunks=tuple((at - start, tokens) for at, tokens in answer.chunks),
                prompt_tokens=answer.prompt_tokens,
                output_tokens=answer.tokens,
                asked_tokens=planned.ask.max_tokens,
                finish_reason=answer.finish_reason,
                error=exchange.error,
                reason=exchange.reason,
            )
        )

    async def _sent(self, body: bytes) -> Exchange:
        self.progress.sent += 1
        return await self._send(body)

    def _sorted(self) -> list[Record]:
        return sorted(self.progress.records, key=lambda record: record.index)
