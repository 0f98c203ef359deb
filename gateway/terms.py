"""What a client asks for besides the answer: by when, and where.

In: HTTP headers, the body's `user`. Out: `Terms`, or an `ApiError` (400). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import invalid

TIMEOUT_HEADER = "X-Request-Timeout"
SESSION_HEADERS = ("X-Session-Affinity", "X-Session-ID")
_LONGEST_SESSION = 256  # characters that count


@dataclass(frozen=True, slots=True)
class Terms:
    timeout_s: float = math.inf  # after its arrival nobody waits for it any more
    session: str = ""  # whose requests had better go where its earlier ones went


def terms_of(headers: Mapping[str, str], user: object) -> Terms:
    session = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")
    if not session and isinstance(user, str):
        session = user
    return Terms(_timeout(headers.get(TIMEOUT_HEADER)), session[:_LONGEST_SESSION])


def _timeout(text: str | None) -> float:
    if text is None:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise invalid(f"{TIMEOUT_HEADER} is {text[:40]!r}; it is a number of seconds above 0", TIMEOUT_HEADER)
    return seconds
