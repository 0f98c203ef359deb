"""Prompts are as long as they say in the server's own tokens, and the same for the same seed."""

from __future__ import annotations

import asyncio
from itertools import islice
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.prompts import COMMON_WORDS, Lexicon, PromptError, Writer, ids_between, lexicon_by_asking, lexicon_of
from bench.workload import Lengths, Segment, length, prefixed_asks, random_asks

WORDS = [f" {a}{b}{c}" for a in "bdfg" for b in "aeiou" for c in "klmn"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE that has the words as tokens, and no other merges than those that lead to them."""
    vocabulary = {piece: place for place, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        built = "Ġ"
        for letter in word[1:]:
            merges.append((built, letter))
            built += letter
            vocabulary.setdefault(built, len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def counter(tokenizer: Tokenizer):  # type: ignore[no-untyped-def]
    async def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


@pytest.mark.parametrize("leading_space", [True, False])
def test_text_is_encoded_to_exactly_as_many_tokens(tokenizer: Tokenizer, leading_space: bool) -> None:
    """Without its space the first word is three tokens here, which the last words make up for."""
    writer = Writer(1, lexicon_of(tokenizer))
    for tokens in (5, 64, 501):
        text = asyncio.run(writer.text((Segment("a", tokens),), counter(tokenizer), leading_space))
        assert len(tokenizer.encode(text).ids) == tokens
        assert text.startswith(" ") == leading_space


def test_ids_and_text_are_the_same_prompt(tokenizer: Tokenizer) -> None:
    writer = Writer(1, lexicon_of(tokenizer))
    recipe = (Segment("a", 7), Segment("b", 9))
    text = asyncio.run(writer.text(recipe, counter(tokenizer), True))
    assert tokenizer.encode(text).ids == writer.ids(recipe)


def test_a_server_that_counts_is_enough_for_text(tokenizer: Tokenizer) -> None:
    """Every common word is several tokens in this tokenizer, and so it is refused; where each is one, it is taken."""
    with pytest.raises(PromptError, match="use token ids"):
        asyncio.run(lexicon_by_asking(counter(tokenizer)))

    async def by_words(text: str) -> int:
        return len(text.split())

    lexicon = asyncio.run(lexicon_by_asking(by_words))
    assert lexicon.size == len(COMMON_WORDS)
    text = asyncio.run(Writer(2, lexicon).text((Segment("a", 30),), by_words, True))
    assert len(text.split()) == 30


def test_a_tokenizer_that_never_gives_the_length_is_an_error() -> None:
    async def even(text: str) -> int:
        return 2 * len(text.split())

    with pytest.raises(PromptError, match="a text of 5 words"):
        asyncio.run(Writer(1, Lexicon(words=(" a", " b"))).text((Segment("a", 5),), even, True))


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    recipe = (Segment("own3", 40),)
    ids = Writer(1, ids_between(0, 5000)).ids(recipe)
    assert ids == Writer(1, ids_between(0, 5000)).ids(recipe) != Writer(2, ids_between(0, 5000)).ids(recipe)


def test_random_prompts_share_nothing_and_lie_between_the_bounds() -> None:
    asks = list(islice(random_asks(Random(1), Lengths(10, 20), Lengths(3, 4)), 200))
    assert {length(ask.prompt) for ask in asks} == set(range(10, 21))
    assert {ask.max_tokens for ask in asks} == {3, 4}
    assert len({segment.stream for ask in asks for segment in ask.prompt}) == 200


def test_prefixed_prompts_share_their_group_s_tokens() -> None:
    writer = Writer(1, ids_between(0, 5000))
    asks = list(islice(prefixed_asks(Random(1), 3, 50, Lengths(10, 10), Lengths(1, 1)), 60))
    beginnings = {tuple(writer.ids(ask.prompt)[:50]) for ask in asks}
    assert len(beginnings) == 3
    assert len({tuple(writer.ids(ask.prompt)[50:]) for ask in asks}) == 60
