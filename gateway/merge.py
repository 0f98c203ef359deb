"""Merges what the two sides of a pair tell about one attempt into one story.

In: token chunks, outcomes and breaks of the prefill and of the decode stream, in any interleaving
of the two. Out: `Deliver` (new tokens, in order) and, exactly once and last, `Finish`. Pure.

Rules:
- Tokens carry positions. A position already delivered is dropped, but its id must be the same.
- A side's own positions are consecutive. A decode token may overtake the prefill's token 0 on the
  wire (they come on two connections), so it waits as long as the prefill side may still tell;
  when it cannot any more, the gap is an error.
- The outcome is decode's, except: what ends the prefill side before the hand-over ends the
  request, be it success (the first token was the last) or failure. A decode token at position 1
  or later proves the hand-over; after it the fate of the prefill side no longer matters.
- After `Finish` nothing more comes out, but the ends of both sides are still recorded. So what an attempt tells
  late, when the next one runs already, is dropped.
- An attempt that resumes another begins behind the tokens delivered before it: positions count on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gateway.instances import Side


class Token(NamedTuple):
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SideEnd(Enum):
    """How a side says it ended (the wire's Outcome.Kind)."""

    HANDED_OVER = "handed over"
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Ending(Enum):
    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Deliver:
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    ending: Ending
    # Of a failure, for people; it names the side.
    reason: str = ""
    # Of a failure: the gRPC status name that fits best.
    status: str = ""
    # Of a failure: another attempt on another pair may succeed.
    retryable: bool = False
    # Of a failure that an instance told or suffered: which, unless what failed lies between the two.
    side: Side | None = None
    # Of a failure: it lies between the two instances of the pair.
    hand_over: bool = False
    # Of a failure that is none: the instance drains and lets go of its requests, or takes none.
    draining: bool = False


Event = Deliver | Finish

_SUCCESS = {SideEnd.STOP: Ending.STOP, SideEnd.LENGTH: Ending.LENGTH}

# gRPC status names of failures that are about this instance at this time, not about the request.
_RETRYABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED")


class Merge:
    """One attempt of one request."""

    def __init__(self, delivered: Iterable[int] = (), most: float = math.inf) -> None:
        """`delivered`: what earlier attempts told of the output; `most`: how many tokens it may have in all."""
        self.delivered: list[int] = list(delivered)  # ids, by position
        self.finish: Finish | None = None
        self.handed_over = False  # proven: decode has all KV and the first token
        self._most = most
        self._first = len(self.delivered)  # position of this attempt's first token
        self._ahead: list[Token] = []  # decode's tokens from position `_ahead_from` on, waiting for token 0
        self._ahead_from = 0
        self._next: dict[Side, int | None] = {Side.PREFILL: None, Side.DECODE: None}
        self._ended: dict[Side, bool] = {Side.PREFILL: False, Side.DECODE: False}
        self._waiting_end: tuple[Ending, int] | None = None  # decode succeeded, but tokens are missing

    def has_ended(self, side: Side) -> bool:
        return self._ended[side]

    def tokens(self, side: Side, position: int, tokens: Sequence[Token]) -> list[Event]:
        """A chunk arrived: consecutive output tokens from `position`."""
        if self.finish is not None or not tokens:
            return []
        if self._ended[side]:
            return self._fail(side, "told tokens after its outcome")
        expected = self._next[side]
        if expected is not None and position != expected:
            return self._fail(side, f"told a token at position {position} where {expected} was due")
        if position + len(tokens) > self._most:
            return self._fail(side, f"told a token at position {position + len(tokens) - 1} of at most {self._most:g}")
        self._next[side] = position + len(tokens)
        if side is Side.DECODE and position + len(tokens) > self._first + 1:
            self.handed_over = True
        if position > len(self.delivered):
            return self._hold(side, position, tokens)
        return self._settle(self._accept(side, position, tokens))

    def outcome(
        self,
        side: Side,
        end: SideEnd,
        reason: str = "",
        output_tokens: int = 0,
        retryable: bool = False,
        hand_over: bool = False,
        draining: bool = False,
    ) -> list[Event]:
        """The side told its outcome."""
        if self._ended[side]:
            return [] if self.finish is not None else self._fail(side, "told two outcomes")
        self._ended[side] = True
        if self.finish is not None:
            return []
        if side is Side.PREFILL:
            return self._prefill_ended(end, reason, output_tokens, retryable, hand_over, draining)
        if end in _SUCCESS:
            # A success has at least one token, also if the side does not count.
            self._waiting_end = (_SUCCESS[end], max(output_tokens, self._first + 1))
            return self._settle([])
        if end is SideEnd.HANDED_OVER:
            return self._fail(side, "says it handed the request over, which only prefill does")
        return self._failed_outcome(side, end, reason, retryable, hand_over, draining)

    def broke(self, side: Side, status: str, reason: str, draining: bool = False) -> list[Event]:
        """The side's stream ended without an outcome; `draining`: it was refused for that."""
        if self._ended[side]:
            return []
        self._ended[side] = True
        if self.finish is not None:
            return []
        if side is Side.PREFILL and self.handed_over:
            return self._settle([])
        return self._fail(side, reason, status=status, retryable=status in _RETRYABLE, draining=draining)

    def close(self, finish: Finish) -> list[Event]:
        """The gateway itself ends the request: a stop string, a client that went away, its own stop."""
        return [] if self.finish is not None else self._finish(finish)

    def _prefill_ended(
        self, end: SideEnd, reason: str, output_tokens: int, retryable: bool, hand_over: bool, draining: bool
    ) -> list[Event]:
        if end in _SUCCESS and not self.handed_over:
            if max(output_tokens, self._first + 1) > len(self.delivered):
                return self._fail(Side.PREFILL, f"told {len(self.delivered)} of its {output_tokens} tokens")
            return self._finish(Finish(_SUCCESS[end]))
        if end is SideEnd.HANDED_OVER:
            self.handed_over = True
        if self.handed_over:
            return self._settle([])
        return self._failed_outcome(Side.PREFILL, end, reason, retryable, hand_over, draining)

    def _failed_outcome(
        self, side: Side, end: SideEnd, reason: str, retryable: bool, hand_over: bool, draining: bool
    ) -> list[Event]:
        # An abort that the gateway did not ask for is the instance's own, as when it drains.
        elsewhere = retryable or end is SideEnd.ABORT
        return self._fail(
            side,
            reason or f"ended the request ({end.value})",
            status="UNAVAILABLE" if elsewhere else "",
            retryable=elsewhere,
            hand_over=hand_over,
            draining=draining,
        )

    def _accept(self, side: Side, position: int, tokens: Iterable[Token]) -> list[Event]:
        """Delivers what is new of tokens that begin at or before the next position."""
        known = len(self.delivered)
        new: list[Token] = []
        for at, token in enumerate(tokens, position):
            if at >= known:
                new.append(token)
            elif self.delivered[at] != token.id:
                return self._fail(side, f"says token {at} is {token.id}, but {self.delivered[at]} was delivered")
        self.delivered.extend(token.id for token in new)
        return [Deliver(tuple(new))] if new else []

    def _hold(self, side: Side, position: int, tokens: Sequence[Token]) -> list[Event]:
        if side is Side.PREFILL or self._ended[Side.PREFILL]:
            return self._fail(side, self._gap(position))
        if not self._ahead:
            self._ahead_from = position
        self._ahead.extend(tokens)
        return []

    def _settle(self, events: list[Event]) -> list[Event]:
        """After anything changed: lets waiting tokens and a waiting end through, or finds that they never can be."""
        if self.finish is not None:
            return events
        prefill_may_tell = not self._ended[Side.PREFILL]
        if self._ahead:
            if self._ahead_from <= len(self.delivered):
                ahead, self._ahead = self._ahead, []
                events += self._accept(Side.DECODE, self._ahead_from, ahead)
                if self.finish is not None:
                    return events
            elif not prefill_may_tell:
                return events + self._fail(Side.DECODE, self._gap(self._ahead_from))
        if self._waiting_end is not None:
            ending, count = self._waiting_end
            if not self._ahead and len(self.delivered) >= count:
                return events + self._finish(Finish(ending))
            if not prefill_may_tell:
                return events + self._fail(Side.DECODE, f"told {len(self.delivered)} of its {count} tokens")
        return events

    def _gap(self, position: int) -> str:
        return f"told a token at position {position}, but position {len(self.delivered)} never came"

    def _fail(
        self,
        side: Side,
        reason: str,
        *,
        status: str = "",
        retryable: bool = False,
        hand_over: bool = False,
        draining: bool = False,
    ) -> list[Event]:
        blamed = None if hand_over else side
        text = f"{side.value} side: {reason}"
        return self._finish(Finish(Ending.FAILED, text, status, retryable, blamed, hand_over, draining))

    def _finish(self, finish: Finish) -> list[Event]:
        assert self.finish is None, "a request ends once"
        self.finish = finish
        self._ahead.clear()
        return [finish]
