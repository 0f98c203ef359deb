"""The process of a member: dials the leader, runs ranks for it, and ends them when it is out of reach.

In: a `DaemonConfig` with `group_index` > 0, and the model's facts. Out: an exit code: 0 stopped on request, 1 gave up,
2 refused. Invariants: ranks run only while the leader answers this member's beats, each within the lease that it gave;
hello is said only when no rank that was started here, or by a process before in the same run folder, is alive.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time

import grpc
import psutil

from paceline_proto.v1 import group_pb2, group_pb2_grpc
from pipeline.io.address import BadAddress, join_host_port, numeric_host, source_towards, split_host_port
from pipeline.io.group.channel import dial_leader
from pipeline.io.group.member_health import MemberHealth
from pipeline.io.group.member_ranks import MemberRanks, Unkillable
from pipeline.io.group.terms import terms_of
from pipeline.io.hosts import this_host
from pipeline.io.instance_config import DaemonConfig, ModelFacts
from pipeline.io.run_folder import RunFolder
from security.exposure import check_cluster_port
from security.secrets import Secrets, load_if

log = logging.getLogger(__name__)

REFUSED = 2
_WELCOME_PATIENCE_S = 10.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.2, 2.0
_LEAVE_GRACE_S = 10.0  # beyond the drain: for the leader to end the epoch
_OUTBOX = 1024
_CLOCK = time.CLOCK_BOOTTIME  # also while the host is suspended
_FINAL = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


class Refused(Exception):
    """The leader will not have this member as it is; trying again would not help."""


class OutOfReach(Exception):
    """No leader, or no longer; the message says what was seen."""


class Member:
    def __init__(
        self, config: DaemonConfig, facts: ModelFacts, secrets: Secrets | None, folder: RunFolder, health: MemberHealth
    ) -> None:
        """`folder` is taken: no process before this one has left a rank alive."""
        self._secrets = secrets
        self._config, self._terms, self._folder, self._health = config, terms_of(config, facts), folder, health
        self.name = f"member {config.group_index} of {config.group_size}"
        self._outbox: asyncio.Queue[group_pb2.AttendRequest] = asyncio.Queue(_OUTBOX)
        self._ranks = MemberRanks(config.instance, config.rank_module, config.secrets, folder, self._say)
        self._sent: dict[int, float] = {}  # beats that were not answered yet
        self._lease_ends = 0.0
        self._leaving = ""
        self._quit = asyncio.Event()

    def leave(self, reason: str) -> None:
        """The first call asks the leader to end the epoch in order, the second ends it at once."""
        if self._leaving or not self._ranks:
            self._quit.set()
            return
        self._leaving = reason
        log.info("asking the leader to end the epoch: %s", reason)
        self._say(group_pb2.AttendRequest(leaving=group_pb2.Leaving(reason=reason)))
        asyncio.get_running_loop().call_later(self._config.drain_timeout + _LEAVE_GRACE_S, self._quit.set)

    async def run(self) -> int:
        backoff, told = _FIRST_BACKOFF_S, ""
        while not self._quit.is_set():
            try:
                await self._attend()
            except (Refused, Unkillable) as error:
                log.error("giving up: %s", error)
                return REFUSED if isinstance(error, Refused) else 1
            except (OutOfReach, BadAddress) as error:
                if str(error) != told:
                    log.warning("the leader at %s is out of reach: %s; trying again", self._config.leader, error)
                told = str(error)
            else:
                backoff, told = _FIRST_BACKOFF_S, ""
            if self._leaving:
                break
            try:
                async with asyncio.timeout(backoff):
                    await self._quit.wait()
            except TimeoutError:
                backoff = min(2 * backoff, _LONGEST_BACKOFF_S)
        return 0

    async def _attend(self) -> None:
        """From hello until the stream is over and every rank is dead. Raises `OutOfReach` if it never began."""
        hello = await asyncio.to_thread(self._hello)
        channel = dial_leader(self._config.leader, self._secrets)
        tasks: list[asyncio.Task[str]] = []
        try:
            call = group_pb2_grpc.GroupStub(channel).Attend()
            self._sent.clear()
            while not self._outbox.empty():  # of the stream before
                self._outbox.get_nowait()
            since = time.clock_gettime(_CLOCK)
            welcome = await _welcome(call, hello)
            self._lease_ends = since + welcome.lease
            log.info("[%s] %s of the leader at %s", self._config.instance, self.name, self._config.leader)
            await self._health.show(True)
            tasks = [asyncio.create_task(work) for work in (
                self._listen(call, welcome.lease), self._speak(call), self._beat(welcome.beat_period), self._quits(),
            )]  # fmt: skip
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._ranks.kill()  # before anything else
            for task in tasks:
                if task.done():
                    log.warning("leaving the leader: %s", task.result())
        finally:
            for task in tasks:
                task.cancel()
            await self._health.show(False)
            await self._ranks.end()
            await channel.close()

    def _hello(self) -> group_pb2.AttendRequest:
        config, terms = self._config, self._terms
        leader_host, _ = split_host_port(config.leader)
        address = numeric_host(config.advertise) if config.advertise else source_towards(leader_host)
        here = this_host(address, self._folder.path, config.model)
        return group_pb2.AttendRequest(
            hello=group_pb2.Hello(
                protocol_version=terms.protocol_version,
                release=terms.release,
                instance=terms.instance,
                role=terms.role,
                group_size=terms.group_size,
                index=config.group_index,
                pp_size=terms.pp_size,
                model_digest=terms.model_digest,
                address=here.address,
                run_dir=here.run_dir,
                model=here.model,
                last_epoch=self._folder.last_epoch(),
                host_name=socket.gethostname(),
                processors=os.cpu_count() or 0,
                memory_bytes=psutil.virtual_memory().total,
            )
        )

    def _say(self, message: group_pb2.AttendRequest) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("the leader does not read")  # its answers to our beats stop as well

    # -- while the stream lasts; each returns why it ended -------------------------------------------------

    async def _listen(self, call: grpc.aio.StreamStreamCall, lease: float) -> str:
        while True:
            try:
                message = await call.read()
            except grpc.aio.AioRpcError as error:
                return f"the stream broke: {error.details()}"
            if message is grpc.aio.EOF:
                return "it ended the stream"
            match message.WhichOneof("message"):
                case "beat" if (sent := self._sent.pop(message.beat.number, None)) is not None:
                    self._lease_ends = sent + lease
                case "start":
                    self._ranks.start(message.start)
                case "end":
                    await self._ranks.end()
                    self._say(group_pb2.AttendRequest(reaped=group_pb2.Reaped(epoch=message.end.epoch)))
                    if self._leaving:
                        await self._outbox.join()
                        self._quit.set()

    async def _speak(self, call: grpc.aio.StreamStreamCall) -> str:
        while True:
            message = await self._outbox.get()
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                return f"the stream broke: {error}"
            self._outbox.task_done()

    async def _beat(self, period: float) -> str:
        number, due = 0, time.clock_gettime(_CLOCK)
        while (now := time.clock_gettime(_CLOCK)) < self._lease_ends:
            if now >= due:
                number, due = number + 1, now + period
                self._sent[number] = now
                self._say(group_pb2.AttendRequest(beat=group_pb2.Beat(number=number)))
            await asyncio.sleep(max(0.0, min(due, self._lease_ends) - now))
        return "its answers to our beats did not come in time; it may have given us up"

    async def _quits(self) -> str:
        await self._quit.wait()
        return self._leaving or "told to stop"


async def _welcome(call: grpc.aio.StreamStreamCall, hello: group_pb2.AttendRequest) -> group_pb2.Welcome:
    """Raises `Refused` or `OutOfReach`."""
    try:
        async with asyncio.timeout(_WELCOME_PATIENCE_S):
            await call.write(hello)
            answer = await call.read()
            if answer is not grpc.aio.EOF and answer.HasField("welcome"):
                return answer.welcome
            code, details = await call.code(), await call.details()
    except TimeoutError:
        raise OutOfReach(f"no answer for {_WELCOME_PATIENCE_S:g} s") from None
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details()
    except asyncio.InvalidStateError:
        code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.UNIMPLEMENTED:
        raise Refused("what listens there does not lead a group; it needs --group-size and --group-index 0")
    if code in _FINAL:
        raise Refused(f"the leader refuses it: {details}")
    raise OutOfReach(details or str(code))


async def attend(config: DaemonConfig, facts: ModelFacts) -> int:
    """Runs a member until it is told to stop (0) or must give up.

    Raises `RunFolderError`, `BadAddress`, `Exposed` or `SecretsError` if it cannot start.
    """
    host, _ = split_host_port(config.listen)
    secrets = load_if(config.secrets)
    check_cluster_port(f"the {config.role} instance", host, secrets is not None, config.insecure)
    folder, health = RunFolder(config.run_dir), MemberHealth(secrets)
    folder.take()
    try:
        member = Member(config, facts, secrets, folder, health)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, member.leave, f"received {number.name}")
        port = await health.start(config.listen)
        log.info("[%s] %s answers for its health at %s", config.instance, member.name, join_host_port(host, port))
        return await member.run()
    finally:
        await health.stop()
        folder.release()
