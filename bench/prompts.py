"""Recipes become prompts of exactly as many tokens as they say.

In: a recipe, a seed, and a lexicon: words of which each is one token wherever it stands. Out: token ids, or text.
A stream's numbers depend on the seed and its name alone, so that equal streams give equal text in every
request. Text is encoded again before it is used; what does not come out at the exact length is an error.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from bench.workload import Recipe, length

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Count = Callable[[str], Awaitable[int]]  # tokens of a text, special ones left out
_WORD = re.compile(r" [a-z]{2,12}")
_FEWEST = 64  # words; with fewer, prompts would repeat themselves
# Asked one by one of a server whose tokenizer is not here; every usual vocabulary has most of them.
COMMON_WORDS = """
the of and to in is for on that by this with you it not or be are from at as your all have new more an was we will home
can us about if page my has search free but our one other do no information time they site he up may what which their
news out use any there see only so his when contact here business who web also now help get view first been would how
were services some these click its like service than find price date back top people had list name just over state year
day into email two health world next used go work last most products music buy data make them should product system post
her city add policy number such please available copyright support message after best software then good video well
where info rights public books high school through each links she review years order very privacy book items company
read group need many user said set under general research university mail full map reviews program life know games way
days management part could great united hotel real item international center must store travel comments made development
report off member details line terms before hotels did send right type because local those using results office
education national car design take posted internet address community within states area want phone shipping reserved
subject between forum family long based code show even black check special prices website index being women much sign
file link open today technology south case project same pages version section own found sports house related security
both county american photo game members power while care network down computer systems three total place end following
download him without per access think north resources current media law control water history pictures size art
personal since including guide shop board location change white text small rating rate government
""".split()


class PromptError(Exception):
    """No prompt of exactly that length can be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Lexicon:
    """`ids[i]` is the token of `words[i]`; words are empty if only ids are known, ids if only words are."""

    ids: tuple[int, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.ids) or len(self.words)


def ids_between(low: int, high: int) -> Lexicon:
    return Lexicon(ids=tuple(range(low, high)))


def load_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise PromptError(f"no tokenizer in {folder} (tokenizer.json is missing)")
    return Tokenizer.from_file(str(file))


def lexicon_of(tokenizer: Tokenizer) -> Lexicon:
    """Short lower-case words with the space before them."""
    found = []
    for token in sorted(tokenizer.get_vocab().values()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _WORD.fullmatch(text) and tokenizer.encode(text, add_special_tokens=False).ids == [token]:
            found.append((token, text))
    return _checked(Lexicon(tuple(token for token, _ in found), tuple(text for _, text in found)))


async def lexicon_by_asking(count: Count) -> Lexicon:
    """Common words that are one token each, by a server's own count. Their ids are not asked for."""
    words = [f" {word}" for word in COMMON_WORDS]
    if await count("".join(words)) != len(words):
        words = [word for word in words if await count(word) == 1]
    return _checked(Lexicon(words=tuple(words)))


def _checked(lexicon: Lexicon) -> Lexicon:
    if lexicon.size < _FEWEST:
        raise PromptError(
            f"only {lexicon.size} plain words are one token each in this tokenizer; text of exact length cannot be made"
            " of them, use token ids (--prompt-as ids --token-ids LOW:HIGH)"
        )
    return lexicon


class Writer:
    """Writes the prompts of one run: same seed, same prompts."""

    def __init__(self, seed: int, lexicon: Lexicon) -> None:
        self._seed, self._lexicon = seed, lexicon
        self._stream = lru_cache(maxsize=4096)(self._draw)

    def ids(self, recipe: Recipe) -> list[int]:
        return [self._lexicon.ids[place] for place in self._places(recipe)]

    async def text(self, recipe: Recipe, count: Count, leading_space: bool) -> str:
        """`leading_space` false: for chat templates, which strip what they are given."""
        words = [self._lexicon.words[place] for place in self._places(recipe)]
        wanted = len(words)
        # A first word without its space may be another number of tokens; the last words make up for it.
        for _ in range(8):
            text = "".join(words) if leading_space else "".join(words).removeprefix(" ")
            got = await count(text)
            if got == wanted:
                return text
            words = words[: wanted - got] if got > wanted else words + words[: wanted - got]
        raise PromptError(
            f"the server's tokenizer makes {got} tokens of a text of {wanted} words, each of them one token"
        )

    def _places(self, recipe: Recipe) -> Sequence[int]:
        places = [place for part in recipe for place in self._stream(part.stream, part.count)]
        assert len(places) == length(recipe)
        return places

    def _draw(self, stream: str, count: int) -> list[int]:
        chance = Random(f"{self._seed}/{stream}")
        return [int(chance.random() * self._lexicon.size) for _ in range(count)]
