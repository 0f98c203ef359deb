"""Makes an instance known to every gateway, for as long as it lives.

In: names of gateways' registries, a way to describe the instance, and nudges when something changed. Out:
heartbeats. Invariants: every name is resolved again and again, to all its addresses: a gateway that comes is
found within seconds, and one that lost its memory is told the whole description at the next heartbeat; no
gateway, however broken, delays what another one hears; nothing here can harm the instance.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from paceline_proto.v1 import bootstrap_pb2, registry_pb2, registry_pb2_grpc
from pipeline.io.address import BadAddress, join_host_port, split_host_port
from security.channels import dial
from security.secrets import Secrets

log = logging.getLogger(__name__)

_RESOLVE_PATIENCE_S = 5.0
_CALL_PATIENCE_S, _LEAVE_PATIENCE_S = 2.0, 0.5
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 1.0
_HEARTBEATS_S = (0.05, 60.0)  # whatever a gateway asks for, within these
_LONGEST_WHY = 400
_MOST_GATEWAYS = 64
_OPTIONS = (
    # A restarted gateway is found again at once, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # One that vanished without a word, with its host, leaves a connection that would be used for minutes.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    # A proxy in the environment is not for these addresses.
    ("grpc.enable_http_proxy", 0),
)

Describe = Callable[[], bootstrap_pb2.DescribeResponse]
Resolve = Callable[[str], Awaitable[list[str]]]


async def resolve(name: str) -> list[str]:
    """All addresses of "host:port". Raises `OSError` or `TimeoutError`."""
    host, port = split_host_port(name)
    try:
        async with asyncio.timeout(_RESOLVE_PATIENCE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host[:80]!r} cannot be the name of a host: {error}") from None
    return list(dict.fromkeys(join_host_port(str(address[0]), port) for *_, address in found))


def heartbeat_pause(asked: float) -> float:
    least, most = _HEARTBEATS_S
    return _LONGEST_BACKOFF_S if math.isnan(asked) else min(max(asked, least), most)


class Registration:
    def __init__(
        self,
        gateways: Sequence[str],
        describe: Describe,
        secrets: Secrets | None = None,
        resolve: Resolve = resolve,
        resolve_every_s: float = 2.0,
    ) -> None:
        """Raises `BadAddress`."""
        for name in gateways:
            if split_host_port(name)[1] == 0:
                raise BadAddress(f"gateway {name!r} has port 0; name the port of its registry")
        self._describe, self._secrets = describe, secrets
        self._resolve, self._resolve_every_s = resolve, resolve_every_s
        self._found: dict[str, list[str]] = {name: [] for name in gateways}  # name → its addresses
        self._silent: dict[str, None] = {}  # names that do not resolve; said once
        self._contacts: dict[str, _Contact] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._found:
            self._task = asyncio.create_task(self._follow_names(), name="gateways")

    def nudge(self) -> None:
        """Something changed: every gateway hears of it now."""
        for contact in self._contacts.values():
            contact.due.set()

    async def leave(self, reason: str) -> None:
        """Says good-bye to all gateways at once; the last thing to be called. Bounded."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        contacts, self._contacts = list(self._contacts.values()), {}
        await asyncio.gather(*(contact.leave(reason) for contact in contacts), return_exceptions=True)

    async def _follow_names(self) -> None:
        while True:
            # Each name by itself: one whose server does not answer must not delay the others.
            await asyncio.gather(*(self._look_up(name) for name in self._found))
            await asyncio.sleep(self._resolve_every_s)

    async def _look_up(self, name: str) -> None:
        try:
            self._found[name] = await self._resolve(name)
        except (OSError, TimeoutError) as error:
            if name not in self._silent:
                self._silent[name] = None
                log.warning("gateway %s does not resolve, trying on: %s", name, error or "no answer")
            return  # those it had may still be there
        if name in self._silent:
            del self._silent[name]
            log.info("gateway %s resolves again", name)
        await self._keep_contacts()

    async def _keep_contacts(self) -> None:
        wanted = dict.fromkeys(address for addresses in self._found.values() for address in addresses)
        for address in [known for known in self._contacts if known not in wanted]:
            await self._contacts.pop(address).close()
        for address in list(wanted)[:_MOST_GATEWAYS]:
            if address not in self._contacts:
                self._contacts[address] = _Contact(address, self._describe, self._secrets)


class _Contact:
    """One gateway: heartbeats until it is closed."""

    def __init__(self, address: str, describe: Describe, secrets: Secrets | None) -> None:
        self.due = asyncio.Event()  # a heartbeat is wanted now
        self._address, self._describe = address, describe
        self._channel = dial(address, secrets, _OPTIONS)
        self._stub: Any = registry_pb2_grpc.RegistryStub(self._channel)
        self._told: str | None = None  # what was last logged about this gateway
        self._task = asyncio.create_task(self._run(), name=f"register with {address}")

    async def close(self) -> None:
        """Its name has lost this address."""
        self._say("is no longer among its name's addresses")
        await self._stop()
        await self._channel.close(grace=None)

    async def leave(self, reason: str) -> None:
        await self._stop()
        request = registry_pb2.LeaveRequest(instance=self._describe().instance, reason=reason)
        try:
            await self._stub.Leave(request, timeout=_LEAVE_PATIENCE_S)
        except grpc.aio.AioRpcError:
            pass  # the lease ends by itself
        finally:
            await self._channel.close(grace=None)

    async def _stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            self.due.clear()
            request = registry_pb2.RegisterRequest(description=self._describe())
            try:
                answer = await self._stub.Register(request, timeout=_CALL_PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    self._say("does not answer, trying on", error.details())
                else:
                    self._say(f"refuses ({error.code().name})", error.details())
                pause, backoff = backoff, min(2 * backoff, _LONGEST_BACKOFF_S)
            except asyncio.CancelledError:
                if self._task.cancelling():
                    raise
                pause = backoff  # a gateway that stops cancels the call
            else:
                self._say("knows this instance")
                backoff = _FIRST_BACKOFF_S
                pause = heartbeat_pause(answer.heartbeat_s)
            try:
                async with asyncio.timeout(pause):
                    await self.due.wait()
            except TimeoutError:
                pass

    def _say(self, what: str, why: str | None = None) -> None:
        """Once, not at every heartbeat, though the details may differ each time."""
        if what != self._told:
            self._told = what
            log.info("gateway %s %s%s", self._address, what, f": {why[:_LONGEST_WHY]}" if why else "")
