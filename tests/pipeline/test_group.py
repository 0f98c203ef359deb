"""One instance on several hosts: real daemons with scripted ranks, which join, die, hang, leave and come back."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_proto.v1 import admin_pb2, generation_pb2
from tests.pipeline.daemon_harness import Daemon, eventually, is_running, request
from tests.pipeline.group_harness import REMEMBERED, ScriptedGroup, children, signal_to, waits_for
from tests.pipeline.scripted_rank import ECHO, HANG

Kind = generation_pb2.Outcome
FENCE = "until no earlier rank of member 1 of 2 can be alive any more"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Sockets lie in it, and their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="pl-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def group(folder: Path) -> Iterator[ScriptedGroup]:
    made = ScriptedGroup(folder)
    yield made
    made.close()


def hang(daemon: Daemon, name: str) -> Any:
    """A request that has begun and will not end by itself."""
    call = daemon.generate(request([HANG], name))
    next(call)
    return call


def end_of(call: Any) -> str:
    outcome = list(call)[-1].outcome
    assert (outcome.kind, outcome.retryable) == (Kind.KIND_ERROR, True)
    return str(outcome.reason)


def echoes(leader: Daemon, name: str) -> bool:
    return list(leader.generate(request([ECHO, 7], name)))[-1].outcome.kind == Kind.KIND_LENGTH


def test_members_join_die_and_come_back_each_time_under_a_new_epoch(group: ScriptedGroup) -> None:
    # Given a leader, when its member has not come, it says so and does not serve;
    leader = group.leader()
    assert (
        waits_for(leader, "waiting for") == "prefill-0 is loading; waiting for member 1 of 2, which has not joined yet"
    )
    assert leader.describe().instance.epoch == REMEMBERED, "a new epoch has no number while old ranks may be alive"
    # when it comes, they serve as one instance, each with its own ranks.
    member = group.member()
    first = leader.when_serving(REMEMBERED + 1).describe().instance.epoch
    ranks = leader.status().ranks
    assert [rank.pid for rank in ranks] == children(leader) + children(member)
    assert [rank.host for rank in ranks] == ["127.0.0.1"] * 2 and all(rank.answered for rank in ranks)
    assert echoes(leader, "a")
    assert "member 1 of 2 joined" in leader.log

    # A second process with the same index has to wait.
    twin = group.member(folder="twin")
    eventually("that the place is taken", lambda: "member 1 of 2 is here already, from 127.0.0.1" in twin.log)
    twin.close()

    # When the member is killed, so are its ranks; the epoch ends with a reason that names it;
    call, pids = hang(leader, "b"), [rank.pid for rank in ranks]
    member.process.kill()
    reason = end_of(call)
    assert "rank 1 is out of reach: member 1 of 2 (127.0.0.1) was lost: its stream was cut" in reason
    eventually("the end of all ranks", lambda: not any(map(is_running, pids)))
    waits_for(leader, "waiting for member 1 of 2, which was lost")
    assert leader.describe().instance.epoch == first
    # when it is back in its folder, nobody has to wait for the death of the ranks that ran in it.
    member = group.member()
    second = leader.when_serving(first + 1).describe().instance.epoch
    assert echoes(leader, "c") and FENCE not in leader.log

    # When a rank dies over there, how it died is said here.
    call = hang(leader, "d")
    os.kill(children(member)[0], signal.SIGKILL)
    assert "rank 1 was killed by SIGKILL" in end_of(call)
    assert leader.when_serving(second + 1).status().restarts == 2 and member.process.poll() is None


def test_a_member_that_stands_still_is_given_up_and_its_ranks_are_dead_before_the_next_epoch(
    group: ScriptedGroup,
) -> None:
    leader, member = group.leader(), group.member()
    epoch = leader.when_serving().describe().instance.epoch
    pids, call = children(member), hang(leader, "a")
    # Given another process that wants its place,
    other = group.member(folder="other")
    eventually("that the place is taken", lambda: "is here already" in other.log)
    # when it stands still, its place is given to the other, which cannot know what became of its ranks.
    signal_to(member, signal.SIGSTOP)
    assert "nothing was heard of it for 2 s" in end_of(call)
    assert leader.describe().instance.epoch == epoch
    # When it can go on, it finds that its lease is over.
    signal_to(member, signal.SIGCONT)
    eventually("the end of its ranks", lambda: not any(map(is_running, pids)))
    assert leader.when_serving(epoch + 1).status().ranks[1].pid in children(other) + children(member)
    assert member.process.poll() is None


def test_a_killed_leader_takes_all_ranks_along_and_its_successor_without_a_disk_has_a_higher_epoch(
    group: ScriptedGroup,
) -> None:
    leader, member = group.leader(first_epoch=50), group.member()
    assert leader.when_serving().describe().instance.epoch == 50
    pids = [rank.pid for rank in leader.status().ranks]
    leader.process.kill()
    eventually("the end of all ranks", lambda: not any(map(is_running, pids)))
    eventually("that the member waits", lambda: "is out of reach" in member.log)
    successor = group.leader(folder="empty")
    assert successor.when_serving().describe().instance.epoch == 51, "the member remembers"
    assert echoes(successor, "a")


def test_a_member_that_is_asked_to_stop_lets_open_requests_end_first(group: ScriptedGroup) -> None:
    leader, member = group.leader(drain_timeout=60), group.member(drain_timeout=60)
    epoch = leader.when_serving().describe().instance.epoch
    call = hang(leader, "a")
    signal_to(member, signal.SIGTERM)
    waits_for(leader, "draining: member 1 of 2 leaves: received SIGTERM")
    assert member.process.poll() is None, "it waits for the open one"
    leader.abort("a")
    assert list(call)[-1].outcome.kind == Kind.KIND_ABORT
    assert member.wait() == 0
    assert waits_for(leader, "waiting").endswith("waiting for member 1 of 2, which has left: received SIGTERM")
    # Its place can be taken at once: its ranks were reaped before it left.
    group.member(folder="other")
    leader.when_serving(epoch + 1)
    assert FENCE not in leader.log
    # When the leader is asked to stop, the members stay and wait for the next one.
    signal_to(leader, signal.SIGTERM)
    assert leader.wait() == 0
    other = group.daemons[-1]
    eventually("no ranks", lambda: not children(other))
    assert other.process.poll() is None
    signal_to(other, signal.SIGTERM)
    assert other.wait() == 0


def test_operators_and_a_member_that_leaves_each_get_their_drain_and_no_open_request_hangs(folder: Path) -> None:
    group = ScriptedGroup(folder, size=3, ranks=3, drain_timeout=60)
    try:
        leader, first, second = group.leader(), group.member(1), group.member(2)
        epoch = leader.when_serving().describe().instance.epoch
        call = hang(leader, "a")
        signal_to(first, signal.SIGTERM)
        waits_for(leader, "draining: member 1 of 3 leaves")
        # Given a member that leaves, when an operator resumes, what is open still gets its time, and nothing new comes.
        assert leader.admin.Resume(admin_pb2.ResumeRequest(), timeout=10).phase == "draining"
        assert leader.describe().draining and leader.status().open_attempts == 1
        # When an operator drains, and then a member dies, the request that is open ends at once, with the reason.
        leader.admin.Drain(admin_pb2.DrainRequest(reason="new kernel", deadline_s=600), timeout=10)
        second.process.kill()
        assert "member 2 of 3 (127.0.0.1) was lost" in end_of(call)
        assert first.wait() == 0
        # A member that leaves while there are no ranks makes nothing drain.
        waits_for(leader, "waiting for member 1 of 3")
        again = group.member(1)
        waits_for(leader, "waiting for member 2 of 3")
        signal_to(again, signal.SIGTERM)
        assert again.wait() == 0
        group.member(1, folder="other")
        group.member(2)
        # The operator's drain has outlived all that, and ends with the operator's word.
        eventually("the next epoch", lambda: leader.describe().draining and leader.describe().instance.epoch > epoch)
        assert leader.describe().not_serving_reason == "prefill-0 is draining: new kernel"
        assert leader.admin.Resume(admin_pb2.ResumeRequest(), timeout=10).phase == "serving"
        assert echoes(leader, "b") and leader.status().open_attempts == 0
    finally:
        group.close()


def test_who_does_not_fit_into_the_group_is_refused_on_both_sides(group: ScriptedGroup) -> None:
    leader = group.leader()
    waits_for(leader, "waiting for member 1 of 2")
    wrong = [
        (group.member(folder="a", digest="d2"), "model digest: the member's is 'd2', the leader's is 'd1'"),
        (group.member(folder="b", pp_size=3, group_size=3), "group size: the member's is 3, the leader's is 2"),
        (group.member(folder="c", instance="prefill-7"), "instance: the member's is 'prefill-7'"),
        (
            group.member(folder="d", role="decode", instance="prefill-0"),
            "role: the member's is 'decode', the leader's is 'prefill'",
        ),
    ]
    for member, says in wrong:
        assert member.wait() == 2
        assert f"giving up: the leader refuses it: {says}" in member.log and says in leader.log


def test_a_member_of_an_instance_that_leads_no_group_is_told_what_to_do(group: ScriptedGroup) -> None:
    alone = group.leader(group_size=1)
    alone.describe()
    member = group.member()
    assert member.wait() == 2
    assert "what listens there does not lead a group; it needs --group-size and --group-index 0" in member.log
