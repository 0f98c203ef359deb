"""The records of the replicated log and what travels beside them on the ring.

An instance's rank 0 writes entries; every rank applies them in sequence. An entry is immutable; the
trailer is rewritten at each hop. Everything here is plain data with one wire form (msgpack arrays),
and nothing here decides anything. What is there by the thousand is kept from the garbage collector (`gc=False`): frozen
structs of numbers and text cannot be part of a cycle, and its passes would take milliseconds.
"""

from __future__ import annotations

from typing import Final

import msgspec

# Vote topics. "bootstrap" is agreed through PPConsensusStore, the others through two-pass ring votes.
BOOTSTRAP: Final = "bootstrap"
PREALLOC: Final = "prealloc"
TRANSFER: Final = "transfer"
RELEASE: Final = "release"
SPILL: Final = "spill"
FILL: Final = "fill"


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True, cache_hash=True):
    """Identity of one attempt of one request; never reused."""

    request: str
    attempt: int

    @property
    def room(self) -> str:
        """Name of the attempt's KV hand-over, the same on the prefill and on the decode side."""
        return f"{self.request}/{self.attempt}"


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a request wants its tokens chosen; field meanings as in `engine.batch.Sampling`."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class PeerRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The instance at the other end of a hand-over; epoch 0 means "whatever runs there now"."""

    instance: str
    address: str
    epoch: int


class RequestSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One attempt as submitted. `timeout` is in microseconds from the entry that opens it.

    The last `resumed` ids of `prompt` are output that earlier attempts told: KV is computed for them as for a prompt,
    but they count as output. `token` opens the attempt's room at the prefill side; it is in no `repr`, hence no log.
    """

    key: Key
    prompt: tuple[int, ...]
    params: SamplingParams
    peer: PeerRef
    timeout: int
    resumed: int = 0
    token: bytes = b""

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "token")
        return f"RequestSpec({', '.join(shown)})"


class Abort(msgspec.Struct, frozen=True, array_like=True):
    """Ends an attempt from outside the pipeline: client, deadline, drain. `kind` is an outcome kind."""

    key: Key
    kind: str
    reason: str
    retryable: bool = False
    hand_over: bool = False


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """Conclusion of PPConsensusStore about a room, as rank 0 saw it."""

    key: Key
    ok: bool
    reason: str = ""


class StageKey(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """An attempt in one stage of its life: `stage_seq` is the seq of the entry that put it there.

    Observations, votes and verdicts carry it, so that a "good" of one stage never counts for another.
    """

    key: Key
    stage_seq: int


class Ballot(msgspec.Struct, frozen=True, array_like=True):
    """A rank's vote, or the votes of ranks 0..k merged: `good` by intersection, `bad` by union."""

    topic: str
    good: tuple[StageKey, ...]
    bad: tuple[tuple[StageKey, str], ...]


class Verdict(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Immutable result of a ballot. `payload` carries what only rank 0 observed (the first token)."""

    topic: str
    ballot_seq: int
    good: tuple[tuple[StageKey, bytes], ...]
    bad: tuple[tuple[StageKey, str], ...]


class TokenOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled token; `top` holds the asked-for best alternatives as (id, log-probability)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Return(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sampler's result of a tick: one token per row that wanted one, in row order."""

    tick: int
    tokens: tuple[TokenOut, ...]


class Launch(msgspec.Struct, frozen=True, array_like=True):
    """Schedule and launch a microbatch now. `rows` caps how many requests it may take."""

    tick: int
    slot: int
    rows: int


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record of the log. `clock` (monotonic) and `wall` are rank 0's readings in microseconds."""

    epoch: int
    seq: int
    clock: int
    wall: int
    requests: tuple[RequestSpec, ...] = ()
    aborts: tuple[Abort, ...] = ()
    admissions: tuple[Admission, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    returns: tuple[Return, ...] = ()
    ballots: tuple[str, ...] = ()
    launch: Launch | None = None


class Trailer(msgspec.Struct, frozen=True, array_like=True):
    """Travels with an entry; `digest` is the sending rank's state digest before the entry."""

    digest: bytes
    votes: tuple[Ballot, ...] = ()
