"""How tokens are chosen from logits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampler import adjust, candidates, sample, uniform
from tests.engine.driver import Params, Wish

VOCAB = 3000


def rows(count: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def test_greedy_takes_the_best_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0], [7.0, 7.0, 7.0, 7.0]])
    assert [chosen.token for chosen in sample(logits, [Wish(), Wish()])] == [1, 0]
    penalized = Wish(Params(presence_penalty=1.0), output=[0])  # the path with penalties has the same rule
    assert [chosen.token for chosen in sample(logits, [penalized, penalized])] == [1, 1]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = rows(4)
    chosen = sample(logits, [Wish(Params(temperature=1e-38, seed=i)) for i in range(4)])
    assert [one.token for one in chosen] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = rows(1)
    prompt, output = [5, 9, 9, 17], [17, 2000]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)[0]
    wish = Wish(Params(repetition_penalty=penalty), prompt=prompt, output=output)
    torch.testing.assert_close(adjust(logits[0], wish), expected, rtol=1e-6, atol=1e-6)


def test_frequency_and_presence_penalties_count_the_output_only() -> None:
    row = torch.zeros(10)
    wish = Wish(Params(frequency_penalty=0.5, presence_penalty=0.25), prompt=[1, 2], output=[2, 3, 3])
    assert adjust(row, wish).tolist() == [0, 0, -0.75, -1.25, 0, 0, 0, 0, 0, 0]
    assert row.tolist() == [0] * 10, "the given logits are left as they were"


def test_bias_is_added_and_forbidden_ids_never_come() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert sample(logits, [Wish(Params(logit_bias=[(0, 10.0)]))])[0].token == 0
    assert sample(logits, [Wish(forbidden=[3])])[0].token == 2
    assert sample(logits, [Wish(Params(logit_bias=[(3, 100.0)]), forbidden=[3])])[0].token == 2
    drawn = {sample(logits, [Wish(Params(1.0, seed=i), forbidden=[3])])[0].token for i in range(200)}
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (Params(0.7), []),
        (Params(1.0, top_k=40), [TopKLogitsWarper(40)]),
        (Params(1.3, top_p=0.8), [TopPLogitsWarper(0.8)]),
        (Params(1.0, top_p=0.999), [TopPLogitsWarper(0.999)]),  # beyond the shortlist
        (Params(1.0, top_p=0.01), [TopPLogitsWarper(0.01)]),
        (Params(0.9, min_p=0.05), [MinPLogitsWarper(0.05)]),
        (Params(0.8, top_k=50, top_p=0.9), [TopKLogitsWarper(50), TopPLogitsWarper(0.9)]),
        (Params(1.1, top_p=0.9, min_p=0.02), [MinPLogitsWarper(0.02), TopPLogitsWarper(0.9)]),
    ],
)
def test_the_filters_are_those_of_transformers(params: Params, warpers: list[object]) -> None:
    for seed in range(5):
        logits = rows(1, seed, spread=1.0 if params.top_p == 0.999 else 3.0)
        warped = TemperatureLogitsWarper(params.temperature)(None, logits)
        for warper in warpers:
            warped = warper(None, warped)  # type: ignore[operator]
        expected = torch.softmax(warped[0].double(), dim=0)
        ids, probabilities = candidates(logits[0], params)
        assert ids.tolist() == (expected > 0).nonzero().squeeze(1).tolist()
        torch.testing.assert_close(probabilities, expected[ids], rtol=1e-4, atol=1e-9)


def test_ties_at_the_edge() -> None:
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert candidates(row, Params(1.0, top_k=2))[0].tolist() == [1, 2, 3], "top_k keeps all that tie with the k-th"
    assert candidates(row, Params(1.0, top_p=0.4))[0].tolist() == [1, 2], "top_p takes the lower ids first"
    assert candidates(row, Params(1.0, top_p=0.0))[0].tolist() == [1], "something is always left"
    assert candidates(torch.zeros(VOCAB), Params(1.0, top_p=0.0999))[0].tolist() == list(range(300))


def test_draws_follow_the_distribution() -> None:
    # Chi-square over 20 000 draws with fixed seeds: 99.9 % quantile for 7 degrees of freedom is 24.3.
    row = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, -1.0, 0.25, 0.75])
    wish = Wish(Params(temperature=0.8))
    draws = 20_000
    wishes = [replace(wish, params=replace(wish.params, seed=i // 100), position=i % 100) for i in range(draws)]
    counts = Counter(chosen.token for chosen in sample(row.expand(draws, -1), wishes))
    expected = torch.softmax(row.double() / 0.8, dim=0) * draws
    statistic = sum((counts[token] - float(expected[token])) ** 2 / float(expected[token]) for token in range(8))
    assert statistic < 24.3


def test_random_numbers_are_uniform_and_fixed_forever() -> None:
    assert uniform(0, 0) == 0.041126683937466435
    numbers = torch.tensor([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8  # 99.9 % quantile, 19 degrees of freedom
    assert uniform(2**63 - 1, 0) != uniform(2**63 - 2, 0)


def test_a_token_depends_on_nothing_but_its_own_row() -> None:
    logits = rows(6)
    wishes = [
        Wish(Params(1.0, seed=3, top_p=0.9, logprobs=3), position=40),
        Wish(Params(0.0, logprobs=0), position=2),
        Wish(Params(1.5, seed=3), position=41),
        Wish(Params(1.0, seed=4, repetition_penalty=1.2), position=40, prompt=[1, 2], output=[3]),
        Wish(),
        Wish(Params(0.5, seed=9, top_k=5, min_p=0.1), position=7),
    ]
    together = sample(logits, wishes)
    alone = [sample(logits[i : i + 1], [wishes[i]])[0] for i in range(6)]
    reversed_order = sample(logits.flip(0), wishes[::-1])[::-1]
    assert together == alone == reversed_order


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = rows(1)
    expected = torch.log_softmax(logits[0], dim=0)
    wish = Wish(Params(2.0, seed=1, top_k=3, repetition_penalty=5.0, logprobs=4), prompt=[0, 1])
    chosen = sample(logits, [wish])[0]
    assert chosen.logprob == float(expected[chosen.token])
    best = expected.topk(4)
    assert chosen.top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert sample(logits, [Wish(Params(logprobs=0))])[0].top == ()
    assert sample(logits, [Wish()])[0].logprob is None


def test_half_precision_logits_are_sampled_in_float32() -> None:
    logits = rows(1).bfloat16()
    wish = Wish(Params(1.0, seed=5, logprobs=1))
    assert sample(logits, [wish]) == sample(logits.float(), [wish])


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="1 samples for logits"):
        sample(rows(2), [Wish()])
    with pytest.raises(ValueError, match="token id 3000 is outside 0"):
        sample(rows(1), [Wish(Params(logit_bias=[(VOCAB, 1.0)]))])
    broken = rows(3)
    broken[1, 7] = math.nan
    with pytest.raises(FloatingPointError, match="row 1"):
        sample(broken, [Wish()] * 3)
    assert sample(rows(2)[:0], []) == []


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"top_p": 0.5}, {}, {"top_k": 3}])
@pytest.mark.parametrize("penalty", [1e-40, 1e-30, 1e38])
def test_parameters_that_overflow_give_a_token_that_may_come(params: dict[str, float], penalty: float) -> None:
    logits = torch.linspace(-30, 30, 50).repeat(1, 1)
    wish = Wish(params=Params(temperature=1.0, repetition_penalty=penalty, **params), prompt=(3, 49), forbidden=(0,))
    (chosen,) = sample(logits, [wish])
    assert 0 < chosen.token < 50


def test_when_nothing_may_come_the_answer_is_still_a_token() -> None:
    wish = Wish(params=Params(temperature=1.0), forbidden=tuple(range(8)))
    assert sample(torch.zeros(1, 8), [wish])[0].token == 0
