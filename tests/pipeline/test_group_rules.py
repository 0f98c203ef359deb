"""The rules of a group alone: who may join, which host runs what, when the next epoch may start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.group import MARGIN_S, Member, Muster, Terms, refusal, share_out
from pipeline.io.hosts import Host
from pipeline.io.instance_config import ConfigError, DaemonConfig, ModelFacts, plan_epoch

TERMS = Terms(1, "0.1.0", "prefill-0", "prefill", 3, 4, "d1")
GOOD = Member(TERMS, 1, "10.0.0.5", "/run/p", "/model", 0)
LEASE = 8.0


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (replace(GOOD, terms=replace(TERMS, protocol_version=2)), "group protocol version: the member's is 2, the leader's is 1"),
        (replace(GOOD, terms=replace(TERMS, release="0.2.0")), "release: the member's is '0.2.0', the leader's is '0.1.0'"),
        (replace(GOOD, terms=replace(TERMS, instance="prefill-1")), "instance: the member's is 'prefill-1'"),
        (replace(GOOD, terms=replace(TERMS, role="decode")), "role: the member's is 'decode'"),
        (replace(GOOD, terms=replace(TERMS, group_size=2)), "group size: the member's is 2, the leader's is 3"),
        (replace(GOOD, terms=replace(TERMS, pp_size=2)), "number of ranks: the member's is 2, the leader's is 4"),
        (replace(GOOD, terms=replace(TERMS, model_digest="d2")), "model digest: the member's is 'd2', the leader's is 'd1'"),
        (replace(GOOD, index=0), "group index 0 is not a member's: they are 1 to 2"),
        (replace(GOOD, index=3), "group index 3 is not a member's"),
        (replace(GOOD, address="pod-1.example"), "'pod-1.example' is not a numeric IP address"),
        (replace(GOOD, address="0.0.0.0"), "0.0.0.0 is not the address of a host"),
        (replace(GOOD, address="127.0.0.1"), "a loopback address cannot be reached from another host"),
        (replace(GOOD, run_dir="run"), "run folder 'run' is not an absolute path"),
    ],
)  # fmt: skip
def test_who_does_not_fit_is_told_both_values(member: Member, says: str) -> None:
    assert says in refusal(TERMS, "10.0.0.4", member)


def test_who_fits_may_join() -> None:
    assert refusal(TERMS, "10.0.0.4", GOOD) == ""


@pytest.mark.parametrize(
    ("ranks", "hosts", "places"),
    [(2, 2, (0, 1)), (4, 3, (0, 0, 1, 2)), (5, 2, (0, 0, 0, 1, 1)), (8, 4, (0, 0, 1, 1, 2, 2, 3, 3)), (1, 1, (0,))],
)
def test_ranks_are_shared_out_in_runs_and_evenly(ranks: int, hosts: int, places: tuple[int, ...]) -> None:
    assert share_out(ranks, hosts) == places


class Clock:
    """A leader's view of a group of two at a time of the test's choosing."""

    def __init__(self, last_epoch: int = 0) -> None:
        self.now = 100.0
        self.muster = Muster(2, LEASE, last_epoch)
        self.muster.ended(self.now)

    def waiting(self) -> str:
        return self.muster.waiting(self.now)

    def join(self, last_epoch: int) -> None:
        self.muster.join(Member(replace(TERMS, group_size=2), 1, "10.0.0.5", "/run/p", "/model", last_epoch))

    def run_epoch(self, epoch: int) -> None:
        assert self.waiting() == ""
        self.muster.start(epoch, self.now)


def test_a_leader_without_memory_waits_until_no_rank_of_its_predecessor_can_be_alive() -> None:
    group = Clock()
    assert group.waiting() == "waiting for member 1 of 2, which has not joined yet"
    group.join(last_epoch=7)  # perhaps another host had its place in epoch 8
    assert "no earlier rank of member 1 of 2 can be alive any more" in group.waiting()
    group.now += LEASE + MARGIN_S
    assert group.waiting() == "" and group.muster.last_epoch == 7


def test_a_member_that_owns_the_folder_of_the_last_ranks_is_proof_of_their_death() -> None:
    group = Clock(last_epoch=7)
    group.join(last_epoch=7)
    assert group.waiting() == ""


def test_another_host_in_the_place_of_a_lost_one_proves_nothing() -> None:
    group = Clock(last_epoch=7)
    group.join(last_epoch=7)
    group.run_epoch(8)
    group.muster.leave(1, "was lost: its stream was cut")
    group.now += 50  # an epoch may go on for long; the bound counts from its end
    group.muster.ended(group.now)
    assert group.waiting() == "waiting for member 1 of 2, which was lost: its stream was cut"
    group.join(last_epoch=0)
    assert "waiting up to 11 s until no earlier rank of member 1 of 2" in group.waiting()
    group.muster.leave(1, "was lost: its stream was cut")
    group.join(last_epoch=7)  # it has seen the epoch before the last, whose ranks may have run elsewhere
    assert "no earlier rank" in group.waiting()
    group.muster.leave(1, "was lost: its stream was cut")
    group.join(last_epoch=8)
    group.run_epoch(9)


def test_a_member_that_remembers_more_than_the_leader_voids_what_older_ones_prove() -> None:
    muster = Muster(3, LEASE, 7)
    muster.ended(0.0)
    muster.join(replace(GOOD, last_epoch=7))
    muster.join(replace(GOOD, index=2, last_epoch=9))
    assert muster.waiting(1.0).endswith("until no earlier rank of member 1 of 3, member 2 of 3 can be alive any more")
    assert muster.waiting(LEASE + MARGIN_S) == "" and muster.last_epoch == 9
    with pytest.raises(AssertionError):
        muster.start(9, LEASE + MARGIN_S)


def test_what_a_member_reaped_is_dead_and_old_news_is_no_proof() -> None:
    group = Clock(last_epoch=7)
    group.join(last_epoch=7)
    group.run_epoch(8)
    group.muster.ended(group.now)
    group.muster.reaped(1, 7)
    assert "no earlier rank" in group.waiting()
    group.muster.reaped(1, 8)
    assert group.waiting() == ""


HOSTS = [Host("10.0.0.4", "/run/a", "/m")] * 2 + [Host("10.0.0.5", "/run/b", "/m2")] * 2
FACTS = ModelFacts(
    digest="d1", num_layers=8, kv_heads=2, head_dim=8, vocab_size=1000, eos_ids=(0,), max_positions=4096,
    layer_ranges=((0, 2), (2, 4), (4, 6), (6, 8)), windows=(0,) * 8,
)  # fmt: skip


def test_links_within_a_host_are_files_and_those_between_hosts_are_locked_ports() -> None:
    config = DaemonConfig(instance="p", model="m", run_dir="r", role="prefill", rank_module="a.b", pp_size=4)
    plan = plan_epoch(config, FACTS, HOSTS, 3)
    ranks = plan.ranks
    assert [rank.relay_in for rank in ranks] == [
        "", "ipc:///run/a/e3/relay1", "tcp://10.0.0.5:7808", "ipc:///run/b/e3/relay3",
    ]  # fmt: skip
    assert [rank.hidden_out for rank in ranks] == [
        "ipc:///run/a/e3/hidden1", "tcp://10.0.0.5:7809", "ipc:///run/b/e3/hidden3", "",
    ]  # fmt: skip
    assert {rank.returns for rank in ranks} == {"tcp://10.0.0.4:7800"}
    assert {rank.store for rank in ranks} == {"tcp://10.0.0.4:7801"}
    assert [rank.control for rank in ranks] == ["ipc:///run/a/e3/control"] * 2 + ["tcp://10.0.0.4:7802"] * 2
    assert [bool(rank.control_key) for rank in ranks] == [False, False, True, True]
    assert (plan.near, plan.far) == ("ipc:///run/a/e3/control", "tcp://10.0.0.4:7802")
    assert [(rank.host, rank.model, rank.dump_dir) for rank in ranks[1:3]] == [
        ("10.0.0.4", "/m", "/run/a/dumps"), ("10.0.0.5", "/m2", "/run/b/dumps"),
    ]  # fmt: skip
    alone = plan_epoch(config, FACTS, HOSTS[:1] * 4, 3)
    assert alone.far == "" and "tcp" not in "".join(rank.store + rank.relay_in + rank.control for rank in alone.ranks)


def test_addresses_of_version_6_are_written_as_such() -> None:
    config = DaemonConfig(instance="p", model="m", run_dir="r", role="prefill", rank_module="a.b", pp_size=4)
    there = Host("fd00::5", "/run/b", "/m")
    assert plan_epoch(config, FACTS, [*HOSTS[:2], there, there], 3).ranks[2].relay_in == "tcp://[fd00::5]:7808"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_size": 5}, "group_size is 5; 4 ranks can be on 1 to 4 hosts"),
        ({"group_size": 2, "group_index": 2}, "group_index is 2, but the group has 2"),
        ({"group_size": 2, "group_index": 1}, "leader is not set; member 1 must know"),
        ({"ring_ports": 65530}, "ring_ports is 65530; 4 ports of each of 4 ranks"),
    ],
)
def test_a_group_that_cannot_be_is_refused(change: dict[str, int], says: str) -> None:
    settings = {"instance": "p", "model": "m", "run_dir": "r", "role": "prefill", "rank_module": "a.b", "pp_size": 4}
    with pytest.raises(ConfigError, match=says):
        DaemonConfig(**(settings | change)).check()
