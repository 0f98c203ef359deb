"""What the gateway knows of an instance, and whether two of them make a pair.

In: facts from Bootstrap.Describe, as plain values. Out: `Instance`, `Pair`, `Fleet`, and the reason
why two instances must not be paired. Pure. A pair is only ever made of a prefill and a decode
instance that agree in everything KV depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

LONGEST_NAME = 256


def is_name(text: str) -> bool:
    """Whether an instance may be called so: it goes into headers and logs."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


class Side(Enum):
    """The two halves of a pair."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Side:
        return Side.DECODE if self is Side.PREFILL else Side.PREFILL


@dataclass(frozen=True, slots=True)
class Instance:
    """One incarnation of an instance that takes requests."""

    dialed: str  # host:port the gateway uses
    side: Side
    instance_id: str
    address: str  # host:port the instance says peers should use
    epoch: int
    protocol_version: int
    model_name: str
    model_digest: str
    num_layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: str
    max_model_len: int
    pages: int
    vocab_size: int
    transfer_backend: str

    @property
    def context_limit(self) -> int:
        """Tokens of prompt plus output that fit: the pool may be smaller than the model's context."""
        limits = (self.max_model_len, self.pages * self.page_size)
        return min((limit for limit in limits if limit > 0), default=0)


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Instance
    decode: Instance

    def of(self, side: Side) -> Instance:
        return self.prefill if side is Side.PREFILL else self.decode

    @property
    def context_limit(self) -> int:
        """Tokens of prompt plus output that fit both; 0: not known."""
        return min((i.context_limit for i in (self.prefill, self.decode) if i.context_limit), default=0)


# Field → how people call it. Order is the order of the message.
_MUST_AGREE = {
    "protocol_version": "protocol version",
    "model_digest": "model digest",
    "num_layers": "number of layers",
    "kv_heads": "number of KV heads",
    "head_dim": "head size",
    "page_size": "page size",
    "kv_dtype": "KV dtype",
    "transfer_backend": "transfer backend",
}


def why_unpairable(prefill: Instance, decode: Instance) -> str | None:
    """Says in what two instances differ that must not, or None if KV may move between them."""
    assert prefill.side is Side.PREFILL and decode.side is Side.DECODE
    differences = [
        f"{words} {getattr(prefill, field)!r} and {getattr(decode, field)!r}"
        for field, words in _MUST_AGREE.items()
        if getattr(prefill, field) != getattr(decode, field)
    ]
    return "; ".join(differences) or None


@dataclass(frozen=True)
class Fleet:
    """The instances that take requests now, each list in the order in which they became known."""

    prefills: tuple[Instance, ...] = ()
    decodes: tuple[Instance, ...] = ()

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """All that fit each other."""
        return tuple(Pair(p, d) for p in self.prefills for d in self.decodes if why_unpairable(p, d) is None)

    @cached_property
    def _limits(self) -> tuple[int, ...]:
        return tuple(pair.context_limit for pair in self.pairs)

    def pairs_for(self, tokens: int) -> list[Pair]:
        """Those that take a request of so many tokens of prompt plus output. All of it must fit the prefill side,
        too, where it may be resumed."""
        return [pair for pair, limit in zip(self.pairs, self._limits, strict=True) if not limit or tokens <= limit]

    def why_no_pair(self) -> str | None:
        """For /health and 503s: what is missing, or None if some pair can serve."""
        if self.pairs:
            return None
        if not self.prefills and not self.decodes:
            return "no prefill and no decode instance is serving"
        if not self.prefills:
            return "no prefill instance is serving"
        if not self.decodes:
            return "no decode instance is serving"
        reason = why_unpairable(self.prefills[0], self.decodes[0])
        return f"no prefill instance is compatible with a decode instance: {reason}"

    @cached_property
    def context_limit(self) -> int | None:
        """The longest prompt plus output that some pair takes; 0 or None: not known."""
        return max(self._limits, default=None)

    @cached_property
    def common_limit(self) -> int | None:
        """The longest that every pair takes."""
        return min((limit for limit in self._limits if limit), default=None)
