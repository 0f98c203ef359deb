"""Knows which instances exist and which of them take requests.

In: endpoints (today a fixed list; whatever discovers them calls `set_endpoints`), and word of
failed calls. Out: the `Fleet` as it is now, and a `Link` to each instance. Each endpoint has one
watching task: it asks Bootstrap.Describe with backoff until the instance serves, then every
`describe_interval_s`, and at once after a failed call. An instance is in the fleet only while its
last Describe said it serves and no call has found it unreachable since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from gateway.config import GatewayConfig
from gateway.instances import Fleet, Instance, Side, why_unpairable
from gateway.wire import PROTO_ROLE, Link, cancelled_by_us, connect, instance_from
from paceline_proto.v1 import bootstrap_pb2
from security.secrets import load_if

log = logging.getLogger("paceline.gateway")

_FIRST_BACKOFF_S = 0.2


@dataclass(frozen=True, slots=True)
class Endpoints:
    """host:port of all instances there should be, serving or not."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    def sides(self) -> dict[str, Side]:
        twice = [address for address in self.prefill if address in self.decode]
        if twice:
            raise ValueError(f"the same address cannot be prefill and decode: {', '.join(twice)}")
        return dict.fromkeys(self.prefill, Side.PREFILL) | dict.fromkeys(self.decode, Side.DECODE)


@dataclass(slots=True)
class _Watched:
    side: Side
    link: Link
    instance: Instance | None = None  # None: takes no requests now
    status: str = "not asked yet"  # why not, for people
    look_now: asyncio.Event = field(default_factory=asyncio.Event)
    looking: bool = False  # it is being asked
    looked: asyncio.Event = field(default_factory=asyncio.Event)  # it has answered, or not; a new event each time
    task: asyncio.Task[None] | None = None


class Registry:
    def __init__(self, config: GatewayConfig, highest_token_id: int) -> None:
        self._config = config
        self._secrets = load_if(config.secrets)
        self._highest_token_id = highest_token_id
        self._watched: dict[str, _Watched] = {}
        self._told: dict[str, None] = {}  # incompatibilities already in the log
        self._fleet = Fleet()
        self._changed = asyncio.Event()  # a new event at each change
        self._leaving: list[asyncio.Task[None]] = []  # closing the channels of instances that are no more

    async def set_endpoints(self, endpoints: Endpoints) -> None:
        """From now on these are the instances. Calls in flight on others may still end by themselves."""
        sides = endpoints.sides()
        for address in [a for a, w in self._watched.items() if sides.get(a) is not w.side]:
            await self._forget(self._watched.pop(address), grace_s=self._config.request_timeout_s)
        for address, side in sides.items():
            if address not in self._watched:
                watched = _Watched(side, connect(address, self._config, self._secrets))
                self._watched[address] = watched
                watched.task = asyncio.create_task(self._watch(watched), name=f"watch {address}")
        self._refresh()

    async def close(self) -> None:
        for watched in self._watched.values():
            await self._forget(watched, grace_s=0.0)
        self._watched.clear()
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    def link(self, instance: Instance) -> Link | None:
        watched = self._watched.get(instance.dialed)
        return None if watched is None else watched.link

    def failed(self, instance: Instance, unreachable: bool) -> None:
        """A call on this incarnation failed: it is asked at once; unreachable, it is not used until it has answered."""
        watched = self._watched.get(instance.dialed)
        if watched is None or watched.instance != instance:
            return
        watched.look_now.set()
        if unreachable:
            watched.instance, watched.status = None, "a call failed"
            self._refresh()

    async def ask_again(self, instance: Instance) -> None:
        """Waits until the fleet knows what the instance, in whatever incarnation, says of itself from now on."""
        watched = self._watched.get(instance.dialed)
        if watched is None:
            return
        watched.look_now.set()
        # An answer to a question of before may be out of date.
        for _ in range(2 if watched.looking else 1):
            await watched.looked.wait()

    def change(self) -> Coroutine[Any, Any, object]:
        """Waits until the fleet is another one than at the call."""
        return self._changed.wait()

    def describe(self) -> list[dict[str, str | bool]]:
        """For people: every endpoint and what is known of it."""
        return [
            {"address": address, "role": w.side.value, "serving": w.instance is not None, "status": w.status}
            for address, w in self._watched.items()
        ]

    async def _forget(self, watched: _Watched, grace_s: float) -> None:
        if watched.task is not None:
            watched.task.cancel()
            with suppress(asyncio.CancelledError):
                await watched.task
        watched.looked.set()  # nobody need wait for an answer any more
        if grace_s == 0.0:
            await watched.link.channel.close(grace=None)
            return
        self._leaving = [task for task in self._leaving if not task.done()]
        self._leaving.append(asyncio.create_task(watched.link.channel.close(grace=grace_s)))

    async def _watch(self, watched: _Watched) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            watched.look_now.clear()
            watched.looking = True
            await self._look(watched)
            watched.looking = False
            watched.looked.set()
            watched.looked = asyncio.Event()
            if watched.instance is not None:
                backoff = _FIRST_BACKOFF_S
                pause = self._config.describe_interval_s
            else:
                pause, backoff = backoff, min(backoff * 2, self._config.describe_interval_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await watched.look_now.wait()

    async def _look(self, watched: _Watched) -> None:
        address = watched.link.address
        try:
            description = await watched.link.bootstrap.Describe(
                bootstrap_pb2.DescribeRequest(), timeout=self._config.describe_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            instance, status = None, f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            if cancelled_by_us():
                raise
            instance, status = None, "it cancelled the call"
        else:
            instance, status = self._judge(watched, description)
        if instance != watched.instance:
            if instance is not None:
                words = "%s instance %s at %s serves (epoch %d)"
                log.info(words, watched.side.value, instance.instance_id, address, instance.epoch)
            else:
                log.warning("%s instance at %s takes no requests: %s", watched.side.value, address, status)
        watched.instance, watched.status = instance, status
        self._refresh()

    def _judge(self, watched: _Watched, description: bootstrap_pb2.DescribeResponse) -> tuple[Instance | None, str]:
        if description.role != PROTO_ROLE[watched.side]:
            return None, f"it is not a {watched.side.value} instance"
        if not description.serving:
            return None, description.not_serving_reason or "not serving"
        if 0 < description.vocab_size <= self._highest_token_id:
            # Another model's tokenizer would produce ids this one cannot embed.
            return None, f"its vocabulary of {description.vocab_size} ids is smaller than the gateway's tokenizer's"
        return instance_from(watched.link.address, watched.side, description), "serving"

    def _refresh(self) -> None:
        def serving(side: Side) -> tuple[Instance, ...]:
            return tuple(w.instance for w in self._watched.values() if w.side is side and w.instance is not None)

        before, self._fleet = self._fleet, Fleet(serving(Side.PREFILL), serving(Side.DECODE))
        if self._fleet != before:
            self._changed.set()
            self._changed = asyncio.Event()
        for prefill in self._fleet.prefills:
            for decode in self._fleet.decodes:
                reason = why_unpairable(prefill, decode)
                if reason is None:
                    continue
                message = f"{prefill.instance_id} ({prefill.dialed}) and {decode.instance_id} ({decode.dialed})"
                message += f" are never paired: {reason}"
                if message not in self._told:
                    self._told[message] = None
                    log.warning("%s", message)
