"""How an attempt ends on one side, and the words for it. Data only."""

from __future__ import annotations

from typing import Final

import msgspec

HANDED_OVER: Final = "handed_over"  # prefill only: decode has all KV and the first token
STOP: Final = "stop"
LENGTH: Final = "length"
ABORT: Final = "abort"
ERROR: Final = "error"


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Exactly one per attempt and side. `retryable`: another pair may succeed.

    `hand_over`: what failed lies between the two instances of the pair, not in one of them. `output_tokens` counts
    those of earlier attempts too. `draining`: nothing failed, the instance let the attempt go.
    """

    kind: str
    reason: str = ""
    output_tokens: int = 0
    retryable: bool = False
    hand_over: bool = False
    draining: bool = False
