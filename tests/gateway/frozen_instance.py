"""A process with one scripted instance that takes requests and never answers: `python -m … prefill|decode`.

Prints its address, and "taken" for each request. Tests stop it with SIGSTOP, as a hung machine would.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from paceline_proto.v1 import generation_pb2
from tests.gateway.scripted_instances import hang, scripted_decode, scripted_prefill


async def take(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
    print("taken", flush=True)
    async for response in hang(request, context):
        yield response


async def main(role: str) -> None:
    instance = scripted_prefill(take, "p0") if role == "prefill" else scripted_decode(take, "d0")
    async with instance.serving():
        print(instance.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
