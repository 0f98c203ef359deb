"""The stream between leader and member, each against a scripted other end: beats, leases, and what is not heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from paceline_proto.v1 import group_pb2, group_pb2_grpc
from pipeline.group import Terms
from pipeline.io.control import RankConfig
from pipeline.io.group.leader import Group
from pipeline.io.group.member import Member
from pipeline.io.group.member_health import MemberHealth
from pipeline.io.group.terms import terms_of
from pipeline.io.hosts import Host, OneHost, RankProcess
from pipeline.io.instance_config import DaemonConfig, plan_epoch
from pipeline.io.run_folder import RunFolder
from tests.pipeline.daemon_harness import is_running
from tests.pipeline.scripted_daemon import facts

PATIENCE_S = 20.0
LEASE_S = 1.0
FACTS = facts("/nowhere", "", 2)
Said = Callable[..., group_pb2.AttendRequest]


def config_of(folder: Path, **more: Any) -> DaemonConfig:
    return DaemonConfig(
        instance="p", model=str(folder), run_dir=str(folder / "r"), role="prefill", pp_size=2, group_size=2,
        rank_module="tests.pipeline.scripted_rank", **more,
    )  # fmt: skip


@asynccontextmanager
async def served(servicer: group_pb2_grpc.GroupServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    group_pb2_grpc.add_GroupServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def until(probe: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not probe():
            await asyncio.sleep(0.01)


# -- the leader, and a member that the test plays -------------------------------------------------------------


class Played:
    """A member's end of a stream."""

    def __init__(self, address: str, terms: Terms) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._call = group_pb2_grpc.GroupStub(self._channel).Attend()
        self._terms = terms

    async def hello(self, **more: Any) -> group_pb2.AttendResponse:
        told = {field: getattr(self._terms, field) for field in Terms.__dataclass_fields__}
        told |= {"index": 1, "address": "127.0.0.1", "run_dir": "/r", "model": "/m", "last_epoch": 7} | more
        await self.say(hello=group_pb2.Hello(**told))
        return await self.hear()

    async def say(self, **message: Any) -> None:
        await self._call.write(group_pb2.AttendRequest(**message))

    async def hear(self) -> group_pb2.AttendResponse:
        async with asyncio.timeout(PATIENCE_S):
            return await self._call.read()

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        return await self._call.code(), await self._call.details()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


def with_leader(tmp_path: Path, scenario: Callable[[Group, Played], Awaitable[None]]) -> None:
    async def run() -> None:
        terms = terms_of(config_of(tmp_path), FACTS)
        host = Host("127.0.0.1", str(tmp_path), str(tmp_path))
        group = Group(terms, host, LEASE_S, last_epoch=7, own=OneHost(host, 2, "none", -1))
        async with served(group) as address:
            member = Played(address, terms)
            await scenario(group, member)
            await member.close()

    asyncio.run(run())


def start_rank_1(group: Group, tmp_path: Path, exits: list[int]) -> RankProcess:
    plan = plan_epoch(config_of(tmp_path), FACTS, group.of_ranks(8), 8)
    return group.launch(plan.ranks[1], exits.append)


def test_who_does_not_say_hello_first_is_refused(tmp_path: Path) -> None:
    async def scenario(group: Group, member: Played) -> None:
        await member.say(beat=group_pb2.Beat(number=1))
        assert await member.refusal() == (grpc.StatusCode.INVALID_ARGUMENT, "a member says hello first")
        assert "has not joined yet" in group.waiting()

    with_leader(tmp_path, scenario)


def test_a_beat_comes_back_and_a_rank_is_told_of_until_it_is_reaped(tmp_path: Path) -> None:
    async def scenario(group: Group, member: Played) -> None:
        assert (await member.hello()).welcome.lease == LEASE_S
        assert group.waiting() == "", "it has the folder of the last epoch"
        await member.say(beat=group_pb2.Beat(number=41))
        assert (await member.hear()).beat.number == 41
        exits: list[int] = []
        rank = start_rank_1(group, tmp_path, exits)
        told = (await member.hear()).start
        config = msgspec.json.decode(told.config, type=RankConfig)
        assert (told.epoch, told.rank, config.rank, config.model) == (8, 1, 1, "/m")
        await member.say(started=group_pb2.RankStarted(epoch=8, rank=1, pid=4711))
        await until(lambda: rank.pid == 4711, "its process id")
        # What is said of other epochs and other ranks changes nothing.
        for epoch, number in ((7, 1), (9, 1), (8, 0), (8, 5)):
            await member.say(exited=group_pb2.RankExited(epoch=epoch, rank=number, status="exited with code 3"))
        await member.say(reaped=group_pb2.Reaped(epoch=7))
        last = group_pb2.RankExited(epoch=8, rank=1, status="was killed by SIGBUS", killed=True, last_lines=["a", "b"])
        await member.say(exited=last)
        await until(rank.exited.is_set, "its end")
        assert (rank.exit_status(), rank.was_killed(), list(rank.last_lines)) == (
            "was killed by SIGBUS",
            True,
            ["a", "b"],
        )
        assert exits == [1] and not await rank.reap(0.05)
        rank.kill()
        rank.kill()
        assert (await member.hear()).end.epoch == 8
        await member.say(reaped=group_pb2.Reaped(epoch=8))
        assert await rank.reap(PATIENCE_S)
        group.epoch_over()
        assert group.waiting() == ""

    with_leader(tmp_path, scenario)


def test_a_silent_member_is_lost_with_its_ranks(tmp_path: Path) -> None:
    async def scenario(group: Group, member: Played) -> None:
        await member.hello()
        exits: list[int] = []
        rank = start_rank_1(group, tmp_path, exits)
        await until(rank.exited.is_set, "its loss")
        assert (
            rank.exit_status() == "is out of reach: member 1 of 2 (127.0.0.1) was lost: nothing was heard of it for 1 s"
        )
        assert rank.was_killed() and await rank.reap(0), "there is nothing to wait for here; the next epoch waits"
        assert "which was lost" in group.waiting()

    with_leader(tmp_path, scenario)


def test_a_member_that_leaves_is_not_started_on_any_more(tmp_path: Path) -> None:
    async def scenario(group: Group, member: Played) -> None:
        left: list[str] = []
        group.on_leave = left.append
        await member.hello()
        await member.say(leaving=group_pb2.Leaving(reason="received SIGTERM"))
        await until(lambda: left, "that it leaves")
        assert left == ["member 1 of 2 leaves: received SIGTERM"]
        assert group.waiting() == "waiting for member 1 of 2, which has left: received SIGTERM"

    with_leader(tmp_path, scenario)


# -- a member, and a leader that the test plays ---------------------------------------------------------------


class PlayedLeader(group_pb2_grpc.GroupServicer):
    """Welcomes, answers the first `answers` beats, and sends what `outbox` holds."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.heard: list[group_pb2.AttendRequest] = []
        self.outbox: list[group_pb2.AttendResponse] = []

    async def Attend(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        async for message in request_iterator:
            self.heard.append(message)
            if message.HasField("hello"):
                welcome = group_pb2.Welcome(lease=LEASE_S, beat_period=0.1)
                await context.write(group_pb2.AttendResponse(welcome=welcome))
            elif message.HasField("beat") and self.answers:
                self.answers -= 1
                await context.write(group_pb2.AttendResponse(beat=message.beat))
            while self.outbox:
                await context.write(self.outbox.pop(0))

    def told(self, what: str) -> list[Any]:
        return [getattr(message, what) for message in self.heard if message.HasField(what)]


def start_of(config: DaemonConfig, epoch: int, rank: int = 1) -> group_pb2.AttendResponse:
    here = Host("127.0.0.1", config.run_dir, config.model)
    told = plan_epoch(config, FACTS, [here, here], epoch).ranks[rank]
    return group_pb2.AttendResponse(start=group_pb2.StartRank(epoch=epoch, rank=rank, config=msgspec.json.encode(told)))


def with_member(tmp_path: Path, leader: PlayedLeader, scenario: Callable[[DaemonConfig], Awaitable[None]]) -> None:
    async def run() -> None:
        async with served(leader) as address:
            config = config_of(tmp_path, group_index=1, leader=address)
            folder = RunFolder(config.run_dir)
            folder.take()
            member = asyncio.create_task(Member(config, FACTS, None, folder, MemberHealth(None)).run())
            try:
                await scenario(config)
            finally:
                member.cancel()
                await asyncio.gather(member, return_exceptions=True)
                folder.release()

    asyncio.run(run())


def test_ranks_are_dead_when_the_lease_is_over_and_only_then_hello_is_said_again(tmp_path: Path) -> None:
    leader = PlayedLeader(answers=3)

    async def scenario(config: DaemonConfig) -> None:
        leader.outbox.append(start_of(config, 5))
        await until(lambda: leader.told("started"), "the rank")
        (started,) = leader.told("started")
        assert (started.epoch, started.rank) == (5, 1) and is_running(started.pid)
        await until(lambda: len(leader.told("hello")) == 2, "another hello")
        assert not is_running(started.pid)
        assert [hello.last_epoch for hello in leader.told("hello")] == [0, 5]

    with_member(tmp_path, leader, scenario)


def test_an_epoch_is_ended_on_request_and_none_starts_twice(tmp_path: Path) -> None:
    leader = PlayedLeader(answers=10_000)

    async def scenario(config: DaemonConfig) -> None:
        leader.outbox.append(start_of(config, 5))
        await until(lambda: leader.told("started"), "the rank")
        leader.outbox += [start_of(config, 5), start_of(config, 6, rank=0)]
        await until(lambda: len(leader.told("exited")) == 2, "two refusals")
        assert "rank 1 of 2 runs already" in leader.told("exited")[0].status
        assert "epoch 6 is not the one that can start here, 5" in leader.told("exited")[1].status
        leader.outbox.append(group_pb2.AttendResponse(end=group_pb2.EndEpoch(epoch=5)))
        await until(lambda: leader.told("reaped"), "that it is reaped")
        assert not is_running(leader.told("started")[0].pid)
        leader.outbox += [
            start_of(config, 5),
            group_pb2.AttendResponse(start=group_pb2.StartRank(epoch=6, rank=1, config=b"{}")),
            start_of(msgspec.structs.replace(config, instance="q"), 6),
            start_of(config, 6),
        ]
        await until(lambda: len(leader.told("started")) == 2, "the next epoch")
        refused = [exited.status for exited in leader.told("exited")[-3:]]
        for status, says in zip(refused, ("epoch 5 is not", "missing required field", "is that of q"), strict=True):
            assert status.startswith("could not be started: ") and says in status

    with_member(tmp_path, leader, scenario)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ALREADY_EXISTS])
def test_a_passing_refusal_is_tried_again(tmp_path: Path, code: grpc.StatusCode) -> None:
    class Busy(PlayedLeader):
        async def Attend(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            self.answers -= 1
            if self.answers >= 0:
                await context.abort(code, "not now")
            await super().Attend(request_iterator, context)

    leader = Busy(answers=2)

    async def scenario(config: DaemonConfig) -> None:
        await until(lambda: leader.told("hello"), "a hello that is heard")

    with_member(tmp_path, leader, scenario)
