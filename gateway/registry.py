"""Knows which instances exist and which of them take requests.

In: a static list, registrations, and word of failed calls. Out: the `Fleet` as it is now, a `Link` to each
instance, and reports of load. An instance that is in the list and registers is one instance; it is forgotten when
it is in neither. What is never paired is said once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from gateway.config import GatewayConfig
from gateway.instances import Fleet, Instance, Side, why_unpairable
from gateway.leases import Leases, Refusal
from gateway.watched import Description, Watched
from gateway.wire import PROTO_ROLE, Link, report_from
from gateway.workbook import Report
from paceline_proto.v1 import bootstrap_pb2, common_pb2, registry_pb2
from security.secrets import Secrets

log = logging.getLogger("paceline.gateway")

MOST_INSTANCES = 1024
_MOST_TOLD = 4096
_SIDES = {role: side for side, role in PROTO_ROLE.items()}


@dataclass(frozen=True, slots=True)
class Endpoints:
    """host:port of all instances of the static list, serving or not."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    def sides(self) -> dict[str, Side]:
        twice = [address for address in self.prefill if address in self.decode]
        if twice:
            raise ValueError(f"the same address cannot be prefill and decode: {', '.join(twice)}")
        return dict.fromkeys(self.prefill, Side.PREFILL) | dict.fromkeys(self.decode, Side.DECODE)


class Registry:
    def __init__(
        self,
        config: GatewayConfig,
        secrets: Secrets | None,
        highest_token_id: int,
        on_report: Callable[[Instance, Report], None] = lambda instance, report: None,
        on_known: Callable[[list[str]], None] = lambda addresses: None,
    ) -> None:
        """`on_known` gets the addresses of all instances there are, when one has gone."""
        self._config = config
        self._secrets = secrets
        self._highest_token_id = highest_token_id
        self._on_report, self._on_known = on_report, on_known
        self._watched: dict[str, Watched] = {}
        self._leases = Leases(config.lease_s, MOST_INSTANCES)
        self._told: dict[str, None] = {}  # incompatibilities already in the log
        self._fleet = Fleet()
        self._changed = asyncio.Event()  # a new event at each change
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def set_endpoints(self, endpoints: Endpoints) -> None:
        """From now on this is the static list. Calls in flight on others may still end by themselves."""
        sides = endpoints.sides()
        for address, watch in list(self._watched.items()):
            watch.static = sides.get(address) is watch.side
        self._forget_the_unknown()
        for address, side in sides.items():
            self._watch(address, side).static = True
        self._refresh()

    def start(self) -> None:
        """Looks after leases from now on."""
        self._spawn(self._look_after_leases())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for watch in self._watched.values():
            await watch.stop()
            await watch.link.channel.close(grace=None)
        self._watched.clear()

    def register(self, description: Description) -> Refusal | None:
        """A heartbeat: instance id, address and role are there. The refusal, if it is not taken."""
        instance, side = description.instance, _SIDES[description.role]
        address, name = instance.address, instance.instance_id
        refusal = self._impostor(name, address) or self._leases.renew(name, address, instance.epoch, time.monotonic())
        if refusal is not None:
            return refusal
        known = self._watched.get(address)
        if known is not None and known.side is not side:
            self._forget(address)
            known = None
        if known is None:
            log.info("%s instance %s at %s has registered (epoch %d)", side.value, name, address, instance.epoch)
        self._watch(address, side).heard(description)
        self._forget_the_unknown()
        return None

    def _impostor(self, name: str, address: str) -> Refusal | None:
        """Who holds the address, and answers there when asked, keeps it."""
        known, holder = self._watched.get(address), self._leases.name_at(address)
        if known is None or holder in ("", name) or known.answers_as != holder:
            return None
        known.doubted()  # if it has gone, the next heartbeat is taken
        return Refusal(f"at {address} answers {holder}, not {name}; every instance needs an address of its own")

    def leave(self, instance: common_pb2.InstanceRef, reason: str) -> None:
        if self._leases.end(instance.instance_id, instance.epoch):
            log.info(
                "instance %s at %s has left: %s", instance.instance_id, instance.address, reason or "no reason given"
            )
            self._forget_the_unknown()

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    def link(self, instance: Instance) -> Link | None:
        watch = self._watched.get(instance.dialed)
        return None if watch is None else watch.link

    def failed(self, instance: Instance, unreachable: bool) -> None:
        """A call on this incarnation failed: it is asked at once; unreachable, it is not used until it has answered."""
        watch = self._watched.get(instance.dialed)
        if watch is not None:
            watch.failed(instance, unreachable)

    async def ask_again(self, instance: Instance) -> None:
        """Waits until the fleet knows what the instance, in whatever incarnation, says of itself from now on."""
        watch = self._watched.get(instance.dialed)
        if watch is not None:
            await watch.ask_again()

    def change(self) -> Coroutine[Any, Any, object]:
        """Waits until the fleet is another one than at the call."""
        return self._changed.wait()

    def describe(self) -> list[dict[str, str | bool]]:
        """For people: every instance and what is known of it."""
        return [
            {"address": address, "role": w.side.value, "serving": w.instance is not None, "status": w.status}
            for address, w in self._watched.items()
        ]

    def registered(self) -> registry_pb2.WatchResponse:
        """The same for programs, in order of names."""
        leases, now = self._leases.held(), time.monotonic()
        known = []
        for address, watch in self._watched.items():
            unknown = bootstrap_pb2.DescribeResponse(
                instance=common_pb2.InstanceRef(address=address), role=PROTO_ROLE[watch.side]
            )
            lease = leases.get(address)
            known.append(
                registry_pb2.RegisteredInstance(
                    description=watch.description or unknown,
                    used=watch.instance is not None,
                    status=watch.status,
                    lease_left_s=None if lease is None else max(lease.until - now, 0.0),
                )
            )
        known.sort(key=lambda one: (one.description.instance.instance_id, one.description.instance.address))
        return registry_pb2.WatchResponse(instances=known)

    def _watch(self, address: str, side: Side) -> Watched:
        if address not in self._watched:
            self._watched[address] = Watched(
                address, side, self._config, self._secrets, self._highest_token_id, self._news
            )
        return self._watched[address]

    def _news(self, watch: Watched) -> None:
        report = None if watch.description is None else report_from(watch.description)
        if watch.instance is not None and report is not None:
            self._on_report(watch.instance, report)
        self._refresh()

    async def _look_after_leases(self) -> None:
        every = self._config.lease_s / 10
        while True:
            for name in self._leases.look(time.monotonic(), every):
                log.warning("instance %s has been silent for %g s and is forgotten", name, self._config.lease_s)
            self._forget_the_unknown()
            await asyncio.sleep(every)

    def _forget_the_unknown(self) -> None:
        leased = self._leases.held()
        gone = [address for address, watch in self._watched.items() if not watch.static and address not in leased]
        for address in gone:
            self._forget(address)
        if gone:
            self._on_known(list(self._watched))
            self._refresh()

    def _forget(self, address: str) -> None:
        self._spawn(self._see_off(self._watched.pop(address)))

    async def _see_off(self, watch: Watched) -> None:
        await watch.stop()
        # What is in flight there may still end by itself.
        await watch.link.channel.close(grace=self._config.request_timeout_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _refresh(self) -> None:
        def serving(side: Side) -> tuple[Instance, ...]:
            found = [w.instance for w in self._watched.values() if w.side is side and w.instance is not None]
            # One that registers under another name of its address than the list has is still one.
            return tuple({(one.instance_id, one.address): one for one in found}.values())

        fleet = Fleet(serving(Side.PREFILL), serving(Side.DECODE))
        if fleet == self._fleet:
            return
        self._fleet = fleet
        self._changed.set()
        self._changed = asyncio.Event()
        for prefill in fleet.prefills:
            for decode in fleet.decodes:
                if reason := why_unpairable(prefill, decode):
                    self._say_once(
                        f"{prefill.instance_id} ({prefill.dialed}) and {decode.instance_id} ({decode.dialed}) "
                        f"are never paired: {reason}"
                    )

    def _say_once(self, message: str) -> None:
        if message in self._told:
            return
        self._told[message] = None
        if len(self._told) > _MOST_TOLD:
            del self._told[next(iter(self._told))]
        log.warning("%s", message)
