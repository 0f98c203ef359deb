"""The leader's side of a group: takes members in, starts ranks on their hosts, and notices who is lost.

In: the members' streams. Out: `pipeline.io.hosts.Hosts` for the supervisor, and a call when a member asks to leave.
Invariants: a member that is silent for its lease, or whose stream ends, is lost at once and with it its ranks; a
message of an earlier epoch, or about somebody else's rank, changes nothing; all decisions are `pipeline.group`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec

from paceline_proto.v1 import group_pb2, group_pb2_grpc
from pipeline.group import Member, Muster, Terms, refusal, share_out
from pipeline.io.control import RankConfig
from pipeline.io.group.remote_rank import RemoteRank
from pipeline.io.hosts import Host, OneHost, RankProcess

log = logging.getLogger(__name__)

_HELLO_PATIENCE_S = 5.0
_OUTBOX = 256  # messages for a member that does not read; more than its ranks and the beats of a lease


class Attendant:
    """One member for as long as its stream lasts."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.ranks: dict[int, RemoteRank] = {}  # of the epoch that runs
        self.epoch = 0
        self.outbox: asyncio.Queue[group_pb2.AttendResponse | None] = asyncio.Queue(_OUTBOX)
        self._ending = 0  # the epoch that it was told to end

    def say(self, **message: Any) -> None:
        try:
            self.outbox.put_nowait(group_pb2.AttendResponse(**message))
        except asyncio.QueueFull:
            log.warning("a message to member %d is lost, it does not read", self.member.index)  # and falls silent

    def start(self, config: RankConfig, on_exit: Callable[[int], None]) -> RemoteRank:
        if config.epoch != self.epoch:
            self.epoch, self.ranks = config.epoch, {}
        rank = RemoteRank(config, on_exit, self._end_epoch)
        self.ranks[config.rank] = rank
        told = group_pb2.StartRank(epoch=config.epoch, rank=config.rank, config=msgspec.json.encode(config))
        self.say(start=told)
        return rank

    def _end_epoch(self) -> None:
        if self._ending != self.epoch:
            self._ending = self.epoch
            self.say(end=group_pb2.EndEpoch(epoch=self.epoch))


class Group(group_pb2_grpc.GroupServicer):
    """The group service, and where its ranks run."""

    def __init__(self, terms: Terms, host: Host, lease: float, last_epoch: int, own: OneHost) -> None:
        """`own` starts the ranks of this host."""
        self.on_leave: Callable[[str], None] = lambda reason: None
        self._terms, self._host, self._own = terms, host, own
        self._muster = Muster(terms.group_size, lease, last_epoch)
        self._places = share_out(terms.pp_size, terms.group_size)
        self._attendants: dict[int, Attendant] = {}
        self._news = asyncio.Event()

    # -- for the supervisor --------------------------------------------------------------------------

    def waiting(self) -> str:
        return self._muster.waiting(time.monotonic())

    async def ready(self) -> None:
        said = ""
        while what := self.waiting():
            if what != said:
                log.info("[%s] %s", self._terms.instance, what)
            said = what
            self._news.clear()
            until_fenced = self._muster.fenced_at - time.monotonic()
            try:
                async with asyncio.timeout(until_fenced if until_fenced > 0 else None):
                    await self._news.wait()
            except TimeoutError:
                pass

    def epoch_over(self) -> None:
        self._muster.ended(time.monotonic())

    def epoch_floor(self) -> int:
        return self._muster.last_epoch

    def of_ranks(self, epoch: int) -> list[Host]:
        self._muster.start(epoch, time.monotonic())
        members = {index: attendant.member for index, attendant in self._attendants.items()}
        hosts = {index: Host(member.address, member.run_dir, member.model) for index, member in members.items()}
        return [hosts[place] if place else self._host for place in self._places]

    def launch(self, config: RankConfig, on_exit: Callable[[int], None]) -> RankProcess:
        place = self._places[config.rank]
        if place == 0:
            return self._own.launch(config, on_exit)
        return self._attendants[place].start(config, on_exit)

    # -- for members ---------------------------------------------------------------------------------

    async def Attend(self, request_iterator: AsyncIterator[group_pb2.AttendRequest], context: Any) -> None:  # type: ignore[override]
        attendant = await self._admit(request_iterator, context)
        lease, why = self._muster.lease, "was lost: its stream was cut"
        listening = asyncio.create_task(self._listen(attendant, request_iterator))
        try:
            welcome = group_pb2.Welcome(lease=lease, beat_period=min(1.0, lease / 5))
            await context.write(group_pb2.AttendResponse(welcome=welcome))
            while (message := await attendant.outbox.get()) is not None:
                await context.write(message)
            why = await listening
        finally:
            listening.cancel()
            self._lose(attendant, why)

    async def _admit(self, messages: AsyncIterator[group_pb2.AttendRequest], context: Any) -> Attendant:
        """Ends the call with a reason if this member cannot join."""
        try:
            async with asyncio.timeout(_HELLO_PATIENCE_S):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a member says hello first")
        if not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a member says hello first")
        member = read_hello(first.hello)
        if why := refusal(self._terms, self._host.address, member):
            log.warning("refused %s at %s: %s", self._muster.name(member.index), member.address[:80], why)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        if (owner := self._attendants.get(member.index)) is not None:
            why = f"{self._muster.name(member.index)} is here already, from {owner.member.address}"
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, why)
        attendant = self._attendants[member.index] = Attendant(member)
        self._muster.join(member)
        self._news.set()
        log.info(
            "%s joined: %s at %s, %d processors, %.1f GiB of memory, last epoch %d", self._muster.name(member.index),
            first.hello.host_name[:80], member.address, first.hello.processors, first.hello.memory_bytes / 2**30,
            member.last_epoch,
        )  # fmt: skip
        return attendant

    async def _listen(self, attendant: Attendant, messages: AsyncIterator[group_pb2.AttendRequest]) -> str:
        """Takes in what a member says until it ends or falls silent; returns what became of the member."""
        lease = self._muster.lease
        try:
            while True:
                async with asyncio.timeout(lease):
                    message = await anext(messages)
                self._take(attendant, message)
        except TimeoutError:
            return f"was lost: nothing was heard of it for {lease:g} s"
        except (StopAsyncIteration, grpc.RpcError):
            return "was lost: its stream was cut"
        finally:
            while attendant.outbox.full():  # what it has not taken by now it will not need
                attendant.outbox.get_nowait()
            attendant.outbox.put_nowait(None)

    def _take(self, attendant: Attendant, message: group_pb2.AttendRequest) -> None:
        match message.WhichOneof("message"):
            case "beat":
                attendant.say(beat=message.beat)
            case "started" if rank := _rank_of(attendant, message.started):
                rank.pid = message.started.pid
            case "exited" if rank := _rank_of(attendant, message.exited):
                rank.ended(message.exited.status, message.exited.killed, message.exited.last_lines)
            case "reaped" if message.reaped.epoch == attendant.epoch:
                self._muster.reaped(attendant.member.index, message.reaped.epoch)
                for rank in attendant.ranks.values():
                    rank.reaped()
                self._news.set()
            case "leaving":
                name, reason = self._muster.name(attendant.member.index), message.leaving.reason[:200]
                self._muster.leave(attendant.member.index, f"has left: {reason}")
                self.on_leave(f"{name} leaves: {reason}")
                self._news.set()

    def _lose(self, attendant: Attendant, why: str) -> None:
        index, name = attendant.member.index, self._muster.name(attendant.member.index)
        del self._attendants[index]
        why = self._muster.seats[index].absent or why  # it has said why it leaves
        self._muster.leave(index, why)
        log.warning("%s at %s %s", name, attendant.member.address, why)
        for rank in attendant.ranks.values():
            rank.lost(f"is out of reach: {name} ({attendant.member.address}) {why}")
        self._news.set()


def read_hello(hello: group_pb2.Hello) -> Member:
    terms = Terms(
        protocol_version=hello.protocol_version,
        release=hello.release,
        instance=hello.instance,
        role=hello.role,
        group_size=hello.group_size,
        pp_size=hello.pp_size,
        model_digest=hello.model_digest,
    )
    return Member(terms, hello.index, hello.address, hello.run_dir, hello.model, hello.last_epoch)


def _rank_of(attendant: Attendant, told: group_pb2.RankStarted | group_pb2.RankExited) -> RemoteRank | None:
    return attendant.ranks.get(told.rank) if told.epoch == attendant.epoch else None
