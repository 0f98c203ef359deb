"""How layers are shared out over ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import ModelSpec, parse_spec, parse_split, split_layers


def spec(layers: int, vocab: int) -> ModelSpec:
    """A Llama whose layers cost 28 672 each, and its head 64 for each token of the vocabulary."""
    return parse_spec(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": vocab,
        }
    )


def cost(model: ModelSpec, part: tuple[int, int]) -> int:
    own = sum(model.layer_parameters(layer) for layer in range(*part))
    return own + (model.head_parameters() if part[1] == model.layers else 0)


def test_the_head_of_a_small_model_counts_as_its_eight_layers() -> None:
    smollm2 = parse_spec(
        {
            "model_type": "llama",
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        }
    )
    assert split_layers(smollm2, 1) == [(0, 30)]
    assert split_layers(smollm2, 2) == [(0, 19), (19, 30)]
    assert [end - start for start, end in split_layers(smollm2, 3)] == [12, 13, 5]
    # A prompt goes through the head with one token.
    assert split_layers(smollm2, 2, with_head=False) == [(0, 15), (15, 30)]


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(1, 9), parts=st.integers(1, 5), vocab=st.integers(1, 3000))
def test_no_split_has_a_cheaper_costliest_rank(layers: int, parts: int, vocab: int) -> None:
    model = spec(layers, vocab)
    if parts > layers:
        with pytest.raises(ValueError, match="needs at least one"):
            split_layers(model, parts)
        return
    split = split_layers(model, parts)
    assert [start for start, _ in split] == [0, *(end for _, end in split[:-1])]
    assert split[-1][1] == layers
    assert all(start < end for start, end in split)
    cuts = itertools.combinations(range(1, layers), parts - 1)
    others = [list(itertools.pairwise([0, *cut, layers])) for cut in cuts]
    assert max(cost(model, part) for part in split) == min(max(cost(model, part) for part in o) for o in others)


def test_an_explicit_split_is_taken_at_its_word() -> None:
    assert parse_split("8,7,8,7", 30) == [(0, 8), (8, 15), (15, 23), (23, 30)]
    assert parse_split("30", 30) == [(0, 30)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("8,7,8", "adds up to 23"),
        ("30,0", "gives a rank no layer"),
        ("a,b", "not a list of numbers"),
        ("", "not a list"),
    ],
)
def test_a_wrong_explicit_split_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_split(text, 30)
