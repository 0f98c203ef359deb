"""Whether a request goes on after an attempt failed, and where it had better not go.

In: how attempts ended. Out: a verdict, suspects, a pause. Pure. A request is resumed at most
`budget` times, and only after failures that say nothing about the request itself. To be moved off an
instance that drains is no failure: it costs no budget and makes no suspect, but it is bounded too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gateway.generation_job import Job
from gateway.instances import Instance, Pair, Side
from gateway.merge import Ending, Finish

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
MOST_MOVES = 64  # off instances that drain; more than a rolling replacement of any cluster can ask of one request


@dataclass(slots=True)
class Recovery:
    """The failures of one request."""

    budget: int
    resumes: int = 0  # after failures
    moves: int = 0  # off instances that drain
    suspects: dict[Instance, None] = field(default_factory=dict)  # incarnations that may be to blame

    def failed(self, pair: Pair, finish: Finish) -> bool:
        """Takes note of a retryable failure; whether the budget allows another attempt."""
        assert finish.retryable
        if finish.draining:
            self.moves += 1
            return self.moves <= MOST_MOVES
        blamed = list(Side) if finish.side is None else [finish.side]
        self.suspects.update(dict.fromkeys(pair.of(side) for side in blamed))
        if self.resumes >= self.budget:
            return False
        self.resumes += 1
        return True

    def exhausted(self, finish: Finish) -> str:
        """Which bound forbids another attempt, for people."""
        if finish.draining:
            return f"it was moved off draining instances {MOST_MOVES} times"
        return f"none of its {self.budget} resumes is left"

    @property
    def attempts(self) -> int:
        """How many there were before the one that runs."""
        return self.resumes + self.moves

    @property
    def pause_s(self) -> float:
        """How long to wait before a suspect is tried again."""
        return min(_FIRST_PAUSE_S * 2.0 ** (self.resumes - 1), _LONGEST_PAUSE_S)


def cause(finish: Finish) -> str:
    """One word for the metrics: which side failed, or what."""
    if finish.draining:
        return "draining"
    if finish.hand_over:
        return "hand_over"
    if is_busy(finish):
        return "busy"
    return finish.side.value if finish.side is not None else "gateway"


def is_busy(finish: Finish) -> bool:
    """Nothing is broken: the instance has as many requests as it takes."""
    return finish.status == "RESOURCE_EXHAUSTED"


def ended_by_last(job: Job, ending_ids: Collection[int], delivered: Sequence[int]) -> Ending | None:
    """How the last token ended the request, if it did and only the word of it was lost."""
    if len(delivered) > job.sampling.min_tokens and delivered and delivered[-1] in ending_ids:
        return Ending.STOP
    return Ending.LENGTH if len(delivered) >= job.sampling.max_tokens else None
