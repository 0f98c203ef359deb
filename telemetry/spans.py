"""What a process tells about the time of one request, and the version of it that tells nothing.

In: moments in µs of the host's monotonic clock, so that spans agree with the phase times. Out: spans, and the
headers by which the next process continues the trace (W3C trace context). Invariant: without a collector the
client's own trace context is passed on, well formed or not at all, and nothing else is done.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, Protocol

Kind = Literal["server", "client", "internal"]
Attributes = Mapping[str, str | int | float | bool]

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_WELL_FORMED = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,64})?")
_LONGEST_STATE = 512


class Span(Protocol):
    def begin(self, name: str, at: int, kind: Kind = "internal", attributes: Attributes | None = None) -> Span:
        """A child that is still to end."""

    def add(self, name: str, begin: int, end: int) -> None:
        """A child that is over."""

    def describe(self, attributes: Attributes) -> None: ...
    def failed(self, reason: str) -> None: ...
    def end(self, at: int) -> None:
        """Once; what comes later is ignored."""

    def headers(self) -> dict[str, str]:
        """For the call that this span is about."""


class Tracer(Protocol):
    def begin(
        self,
        name: str,
        carrier: Mapping[str, str],
        at: int,
        kind: Kind = "server",
        attributes: Attributes | None = None,
    ) -> Span:
        """The first span of this process; `carrier`: the headers it was called with, names in lower case."""

    def close(self) -> None:
        """Tells what is left to tell, within two seconds."""


class SilentSpan:
    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def begin(self, name: str, at: int, kind: Kind = "internal", attributes: Attributes | None = None) -> Span:
        return self

    def add(self, name: str, begin: int, end: int) -> None: ...
    def describe(self, attributes: Attributes) -> None: ...
    def failed(self, reason: str) -> None: ...
    def end(self, at: int) -> None: ...

    def headers(self) -> dict[str, str]:
        return self._headers


class SilentTracer:
    """There is no collector."""

    def begin(
        self,
        name: str,
        carrier: Mapping[str, str],
        at: int,
        kind: Kind = "server",
        attributes: Attributes | None = None,
    ) -> Span:
        return SilentSpan(passed_on(carrier))

    def close(self) -> None: ...


SILENT = SilentTracer()


def passed_on(carrier: Mapping[str, str]) -> dict[str, str]:
    """The trace context of a caller as it may go on to the next process."""
    parent, state = carrier.get(TRACEPARENT, ""), carrier.get(TRACESTATE, "")
    if not _WELL_FORMED.fullmatch(parent):
        return {}
    kept = state and len(state) <= _LONGEST_STATE and state.isascii() and state.isprintable()
    return {TRACEPARENT: parent, **({TRACESTATE: state} if kept else {})}
