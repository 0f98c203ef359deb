"""Instances on several hosts with real ranks: the ring, the hidden states and the hand-over go over TCP.

`make soak ARGS="-k test_group"`; what daemons do is in the default run, `tests/pipeline/test_group.py`.
"""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.group import GroupedPair
from tests.e2e.prompts import prompts, reference

TOKENS = 64
pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]


def test_tokens_of_a_group_are_the_references_also_after_a_member_was_killed(tiny: Path) -> None:
    asked, wanted = prompts(tiny), reference(tiny, TOKENS)
    chosen = (0, 2, 5, 9, 21, 22)
    with GroupedPair(tiny, "--chunk-size", "128", "--ring-timeout", "4") as pair, ThreadPoolExecutor(8) as pool:
        # Between hosts listen: returns, store and control at rank 0; relay and hidden states at rank 1.
        assert pair.tcp_endpoints("prefill") == pair.tcp_endpoints("decode") == {0, 1, 2, 4, 5}
        assert [pair.generate(asked[i], TOKENS) == wanted[i] for i in chosen] == [True] * len(chosen)
        told = pair.status()
        assert [rank["host"] for instance in told for rank in instance["ranks"]] == ["127.0.0.1"] * 4
        assert all(rank["answered"] and not rank["audit"] for instance in told for rank in instance["ranks"])
        epochs = [instance["epoch"] for instance in told]
        assert min(epochs) > 1_700_000_000, "fresh run folders: the epoch comes from the clock"

        # When the member of the decode instance is killed in mid-stream, clients do not notice.
        jobs = [pool.submit(pair.generate, asked[i], TOKENS) for i in (22, 21, 5, 3)]
        os.kill(pair.parts["decode-1"].pid, signal.SIGKILL)
        pair.parts["decode-1"].wait(30)
        pair.start("decode", 1)
        assert [job.result(200) for job in jobs] == [wanted[i] for i in (22, 21, 5, 3)]
        decode = pair.status()[1]
        assert decode["epoch"] > epochs[1] and "member 1 of 2 (127.0.0.1) was lost" in decode["last_failure"]


def test_a_storm_of_killed_leaders_members_and_ranks_under_load(tiny: Path) -> None:
    asked, wanted = prompts(tiny), reference(tiny, TOKENS)
    chance = random.Random(5)
    with GroupedPair(tiny, "--chunk-size", "128", "--ring-timeout", "4") as pair, ThreadPoolExecutor(8) as pool:
        for _ in range(24):
            picked = [chance.randrange(23) for _ in range(6)]
            jobs = [pool.submit(pair.generate, asked[i], TOKENS) for i in picked]
            victims = [name for name in pair.parts if name != "gateway"]
            ranks = [rank["pid"] for instance in pair.status() for rank in instance["ranks"] if rank["pid"]]
            if chance.random() < 0.3 and ranks:
                os.kill(chance.choice(ranks), signal.SIGKILL)
            else:
                name = chance.choice(victims)
                pair.parts[name].kill()
                pair.parts[name].wait(30)
                role, _, index = name.partition("-")
                pair.start(role, int(index))
            assert [job.result(280) for job in jobs] == [wanted[i] for i in picked]
            pair.until_serving()
