"""Not a test: scripted instances that register as real ones do, `python -m tests.gateway.registering GATEWAY COUNT`.

One process, many instances, each with a gRPC server and the real registration. Prints "ready" when all serve;
ends when its standard input does, after all have left.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from pipeline.io.registration import Registration
from tests.gateway.scripted_instances import (
    ScriptedInstance,
    decode_saying,
    prefill_saying,
    scripted_decode,
    scripted_prefill,
)


@asynccontextmanager
async def registered(instance: ScriptedInstance, gateways: Sequence[str]) -> AsyncIterator[Registration]:
    """It serves, and gateways hear of it; in the end it leaves."""
    async with instance.serving():
        registration = Registration(gateways, instance.description)
        registration.start()
        try:
            yield registration
        finally:
            await registration.leave("the test is over")


async def main(gateway: str, count: int) -> None:
    async with AsyncExitStack() as stack:
        for number in range(count // 2):
            for instance in (
                scripted_prefill(prefill_saying(5), f"p{number}"),
                scripted_decode(decode_saying([5, 6]), f"d{number}"),
            ):
                await stack.enter_async_context(registered(instance, [gateway]))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
