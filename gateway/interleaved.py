"""Several streams read as one.

In: asynchronous iterators. Out: their items as they come, each with the number of its iterator.
Invariants: the items of one iterator stay in order; at most one item of each is read ahead; the first
exception of any ends all. Close it (`contextlib.aclosing`): what still waits is cancelled then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


async def interleaved(streams: Sequence[AsyncIterator[_Item]]) -> AsyncGenerator[tuple[int, _Item], None]:
    if len(streams) == 1:  # the usual case needs no tasks
        async for only in streams[0]:
            yield 0, only
        return
    waiting: dict[asyncio.Task[_Item | None], int] = {}

    def read(number: int) -> None:
        waiting[asyncio.create_task(_next(streams[number]))] = number

    for number in range(len(streams)):
        read(number)
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task.done()]:
                number, item = waiting.pop(task), task.result()
                if item is not None:
                    read(number)
                    yield number, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: AsyncIterator[_Item]) -> _Item | None:
    return await anext(stream, None)
