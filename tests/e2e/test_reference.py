"""Through gateway, prefill and decode, greedy tokens equal transformers' `generate`, whatever the topology."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.prompts import prompts, reference

TOPOLOGIES = [(1, 1), (2, 2), (2, 1), (1, 2), (3, 2), (4, 4)]
TOKENS = 64
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


def check(model: Path, topology: tuple[int, int], alone: int, *options: str) -> None:
    """`alone` of the prompts one by one, then all of them 8 at once."""
    asked, wanted = prompts(model), reference(model, TOKENS)
    assert len(asked) >= 24 and len(asked[0]) == 1 and max(map(len, asked)) == 3000
    with Cluster(*options, model=model, prefill_pp=topology[0], decode_pp=topology[1]) as cluster:
        picked = sorted(range(len(asked)), key=lambda i: (i * 7) % len(asked))[:alone]
        for i in picked:
            assert cluster.generate(asked[i], TOKENS) == wanted[i], f"prompt {i} alone"
        answers = cluster.generate_all(asked, TOKENS, at_once=8)
        assert [i for i, (got, want) in enumerate(zip(answers, wanted, strict=True)) if got != want] == []
        lengths = [len(asked[i]) for i in picked] + list(map(len, asked))
        assert cluster.ranks("prefill")[0]["counters"]["prompt_tokens_computed"] == sum(lengths)
        for rank in cluster.ranks("decode"):
            assert rank["counters"]["prompt_tokens_computed"] == 0, "decode computed a prompt token"
            assert rank["counters"]["tokens_generated"] == (TOKENS - 1) * len(lengths)
        cluster.assert_baseline()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_a_small_model_in_every_topology(tiny: Path, topology: tuple[int, int]) -> None:
    check(tiny, topology, 8, "--chunk-size", "128")


def test_a_small_model_through_nixl(tiny: Path) -> None:
    check(tiny, (2, 2), 4, "--chunk-size", "128", "--transfer-backend", "nixl")


def test_the_default_model(smollm2: Path) -> None:
    check(smollm2, (2, 2), 3)


@pytest.mark.soak
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_the_default_model_in_every_topology_alone_and_eight_at_once(smollm2: Path, topology: tuple[int, int]) -> None:
    check(smollm2, topology, 24)
