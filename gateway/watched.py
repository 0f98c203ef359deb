"""One instance as the gateway sees it: what it says of itself, and whether calls reach it.

In: answers to Bootstrap.Describe, heartbeats, failed calls. Out: the `Instance`, or None while it gets no new
requests, with the reason. Invariant: there is an `Instance` only if the last description said that it serves,
and no call has found it unreachable since it was last asked.

One that registers tells its changes itself; it is asked when it is new, and after failed calls. One of a static
list is asked again and again. A single answer that does not come is no reason to part with one that serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import grpc

from gateway.config import GatewayConfig
from gateway.instances import LONGEST_NAME, Instance, Side, is_name
from gateway.wire import PROTO_ROLE, cancelled_by_us, connect, instance_from
from paceline_proto.v1 import bootstrap_pb2
from security.secrets import Secrets

log = logging.getLogger("paceline.gateway")

_FIRST_BACKOFF_S = 0.2
_LONGEST_REASON = 1000
_NOT_ASKED = "not asked yet"
Description = bootstrap_pb2.DescribeResponse


class Watched:
    def __init__(
        self,
        address: str,
        side: Side,
        config: GatewayConfig,
        secrets: Secrets | None,
        highest_token_id: int,
        on_news: Callable[[Watched], None],
    ) -> None:
        self.side, self.link = side, connect(address, config, secrets)
        self.static = False  # it is in a list, so that it is asked from time to time
        self.description: Description | None = None
        self.instance: Instance | None = None
        self.status = _NOT_ASKED  # why it is not used, for people
        self._config, self._highest_token_id, self._on_news = config, highest_token_id, on_news
        self._look_now = asyncio.Event()
        self._looking = False  # it is being asked
        self._looked = asyncio.Event()  # it has answered, or not; a new event each time
        self.answers_as = ""  # the instance id it gave when last asked; empty: it could not be reached
        self._reached = False  # what it said last time, it said to us
        self._task = asyncio.create_task(self._run(), name=f"watch {address}")

    @property
    def address(self) -> str:
        return self.link.address

    def heard(self, description: Description) -> None:
        """It told of itself unasked. That it can be called is not known by that."""
        self.description = description
        if self._reached:
            self._take(description)
        else:
            self._look_now.set()

    def failed(self, instance: Instance, unreachable: bool) -> None:
        """A call on this incarnation failed: it is asked at once; unreachable, it is not used until it has answered."""
        if self.instance != instance:
            return
        self._look_now.set()
        if unreachable:
            self._lose("a call failed")

    def doubted(self) -> None:
        """Another instance says that it is there: it is asked at once."""
        self._look_now.set()

    async def ask_again(self) -> None:
        """Waits until it has said what it is from now on, or has not."""
        self._look_now.set()
        # An answer to a question of before may be out of date.
        for _ in range(2 if self._looking else 1):
            await self._looked.wait()

    async def stop(self) -> None:
        """It is not asked any more; calls in flight go on."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._looked.set()  # nobody need wait for an answer any more

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            self._look_now.clear()
            self._looking = True
            await self._look()
            self._looking = False
            self._looked.set()
            self._looked = asyncio.Event()
            pause: float | None
            if self.instance is not None:
                backoff = _FIRST_BACKOFF_S
                pause = self._config.describe_interval_s if self.static else None
            else:
                pause, backoff = backoff, min(backoff * 2, self._config.describe_interval_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look_now.wait()

    async def _look(self) -> None:
        patience = 2 if self.instance is not None else 1
        for left in reversed(range(patience)):
            try:
                description = await self.link.bootstrap.Describe(
                    bootstrap_pb2.DescribeRequest(), timeout=self._config.describe_timeout_s
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and left:
                    continue
                self._lose(f"{error.code().name}: {error.details()}")
            except asyncio.CancelledError:
                if cancelled_by_us():
                    raise
                self._lose("it cancelled the call")
            else:
                self._reached, self.answers_as = True, description.instance.instance_id
                self._take(description)
            return

    def _take(self, description: Description) -> None:
        self.description = description
        self._become(*self._judge(description))

    def _lose(self, why: str) -> None:
        self._reached, self.answers_as = False, ""
        self._become(None, why)

    def _become(self, instance: Instance | None, status: str) -> None:
        if instance != self.instance or self.status == _NOT_ASKED:
            if instance is not None:
                words = "%s instance %s at %s serves (epoch %d)"
                log.info(words, self.side.value, instance.instance_id, self.address, instance.epoch)
            else:
                log.warning("%s instance at %s takes no requests: %s", self.side.value, self.address, status)
        self.instance, self.status = instance, status
        self._on_news(self)

    def _judge(self, description: Description) -> tuple[Instance | None, str]:
        if description.role != PROTO_ROLE[self.side]:
            return None, f"it is not a {self.side.value} instance"
        if not description.serving:
            return None, description.not_serving_reason[:_LONGEST_REASON] or "not serving"
        for what in ("instance_id", "address"):
            value = getattr(description.instance, what)
            if value and not is_name(value):
                return None, f"its {what} has {len(value)} characters; at most {LONGEST_NAME} printable ones are taken"
        if 0 < description.vocab_size <= self._highest_token_id:
            # Another model's tokenizer would produce ids this one cannot embed.
            return None, f"its vocabulary of {description.vocab_size} ids is smaller than the gateway's tokenizer's"
        return instance_from(self.address, self.side, description), "serving"
