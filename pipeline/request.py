"""One attempt as the replicated state knows it. Changed only by the log."""

from __future__ import annotations

from consensus.entry import RequestSpec, SamplingParams, StageKey
from pipeline.outcome import LENGTH, STOP, Outcome
from pipeline.planner import SampleSpec

DONE = "done"
ABORTING = "aborting"


class Request:
    """`computed` counts positions whose KV is written or in flight; `ticks` the launches not yet harvested.

    `output` holds this attempt's tokens. The request's output is longer by the `resumed` last ids of the prompt;
    `told` is its length, and `length` that of the whole text.
    """

    __slots__ = (
        "budget", "computed", "deadline", "ending", "key", "number", "output", "penal", "prompt_len", "spec",
        "stage_deadline", "stage_seq", "state", "ticks",
    )  # fmt: skip

    def __init__(self, spec: RequestSpec, state: str, clock: int, seq: int, number: int, max_len: int) -> None:
        self.spec = spec
        self.key = spec.key
        self.prompt_len = len(spec.prompt)
        self.number = number  # counts the attempts the log opened: smaller is older
        self.state = state
        self.stage_seq = seq
        self.deadline = clock + spec.timeout
        self.stage_deadline = 0  # clock at which the present stage is over time; 0 = it has no deadline
        params = spec.params
        # Asked at every token: how long `output` may become, and whether the sampler must see it.
        self.budget = min(params.max_tokens - spec.resumed, max_len - self.prompt_len)
        self.penal = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
        self.computed = 0
        self.ticks: list[int] = []
        self.output: list[int] = []
        self.ending: Outcome | None = None  # told, or to be told, when what is under way is over

    @property
    def params(self) -> SamplingParams:
        return self.spec.params

    @property
    def told(self) -> int:
        return self.spec.resumed + len(self.output)

    @property
    def length(self) -> int:
        return self.prompt_len + len(self.output)

    @property
    def left(self) -> int:
        """How many more tokens this attempt may generate."""
        return self.budget - len(self.output)

    @property
    def stage(self) -> StageKey:
        return StageKey(self.spec.key, self.stage_seq)

    def finish(self, eos: tuple[int, ...]) -> Outcome | None:
        """The outcome if the last output token ended the request, else None.

        End-of-sequence and stop ids are counted as output, as OpenAI's usage does not say otherwise and
        vLLM does; `min_tokens` needs no check here because the sampler could not choose them.
        """
        token, params = self.output[-1], self.spec.params
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
            return Outcome(STOP, output_tokens=self.told)
        if len(self.output) >= self.budget:
            return Outcome(LENGTH, output_tokens=self.told)
        return None

    def sample(self, eos: tuple[int, ...]) -> SampleSpec:
        """What the sampler needs for the next output token."""
        spec = self.spec
        params, prompt, told = spec.params, spec.prompt, spec.resumed + len(self.output)
        forbidden = (*eos, *params.stop_token_ids) if told < params.min_tokens else ()
        position = len(prompt) + len(self.output)
        # Copying the output at every token would be quadratic; only penalties look at it.
        if not self.penal:
            return SampleSpec(params, position, forbidden, (), ())
        own = len(prompt) - spec.resumed
        return SampleSpec(params, position, forbidden, prompt[:own], (*prompt[own:], *self.output))
