"""What the runtime is asked to compute: one packed batch of rows, and what it answers.

The planner's own row type satisfies these protocols; `engine` never imports the
planner. A batch is *packed* (varlen): rows of prefill chunks and of single decode
tokens stand one after another, nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Sampling(Protocol):
    """How a request wants its tokens chosen. Field meanings are OpenAI's and vLLM's."""

    @property
    def temperature(self) -> float: ...  # 0 = greedy
    @property
    def top_p(self) -> float: ...  # 1 = off
    @property
    def top_k(self) -> int: ...  # 0 = off
    @property
    def min_p(self) -> float: ...  # 0 = off
    @property
    def seed(self) -> int: ...  # 0 <= seed < 2**63, always present
    @property
    def repetition_penalty(self) -> float: ...  # 1 = off; over prompt and output
    @property
    def presence_penalty(self) -> float: ...  # 0 = off; over output only
    @property
    def frequency_penalty(self) -> float: ...  # 0 = off; over output only
    @property
    def logit_bias(self) -> Sequence[tuple[int, float]]: ...
    @property
    def logprobs(self) -> int: ...  # -1 = none, n >= 0: the chosen token's and the n best


class Sample(Protocol):
    """The request behind a row whose last position yields a token."""

    @property
    def params(self) -> Sampling: ...
    @property
    def position(self) -> int: ...  # absolute position the sampled token will take
    @property
    def forbidden(self) -> Sequence[int]: ...  # ids that must not come now (min_tokens)
    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def output(self) -> Sequence[int]: ...  # tokens generated so far


class Row(Protocol):
    """`len(tokens)` consecutive positions of one request, from `start`."""

    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def pages(self) -> Sequence[int]: ...  # page table: position p lives in pages[p // page_size]
    @property
    def sample(self) -> Sample | None: ...  # None: no token wanted (a chunk in the middle)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token. Log-probabilities are natural, of the raw (unmodified) logits."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
