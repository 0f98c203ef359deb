"""What this gateway has given each instance to do, together with what the instance says it has to do.

In: requests that start and end, reports. Out: a `Load` per instance. Pure. Every `started` is followed by
exactly one `ended`; when all have ended, nothing of one's own is outstanding.

A report is late: it may not know yet of what was given since the report before it. So what was started in that
time is counted beside the report; twice at worst, and for one report only. What is one's own is known exactly,
which bounds the sum: the rest can only be what the report has beyond it, the work of other gateways.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from gateway.instances import Instance, Side
from gateway.policies import Cost, Load


@dataclass(frozen=True, slots=True)
class Report:
    """What an instance says of itself."""

    queued_tokens: int = 0  # of prompts, not computed yet
    free_pages: int = 0
    requests: int = 0
    prefill_rate: float = 0.0  # tokens per second; 0: not known


@dataclass(slots=True)
class _Work:
    tokens: int = 0
    requests: int = 0

    def add(self, tokens: int, requests: int) -> None:
        self.tokens += tokens
        self.requests += requests
        assert self.tokens >= 0 and self.requests >= 0, f"more work ended than was given: {self}"


@dataclass(slots=True)
class _Page:
    """One instance."""

    last_chosen: int = 0
    reports: int = 0
    told: Load | None = None  # by the last report
    own: _Work = field(default_factory=_Work)  # outstanding
    own_then: _Work = field(default_factory=_Work)  # as it was at the last report
    new: _Work = field(default_factory=_Work)  # outstanding, started since the last report
    newish: _Work = field(default_factory=_Work)  # outstanding, started between the last two
    gone: _Work = field(default_factory=_Work)  # ended since the last report, started long before


@dataclass(frozen=True, slots=True)
class Entry:
    """A request in the book, to be handed back when it ends."""

    dialed: str
    tokens: int
    reports: int  # how many the book had when it started


class Workbook:
    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}

    def started(self, instance: Instance, cost: Cost, decision: int) -> Entry:
        page = self._pages.setdefault(instance.dialed, _Page())
        page.last_chosen = decision
        tokens = cost.on(instance.side)
        page.own.add(tokens, 1)
        page.new.add(tokens, 1)
        return Entry(instance.dialed, tokens, page.reports)

    def ended(self, entry: Entry) -> None:
        page = self._pages[entry.dialed]
        page.own.add(-entry.tokens, -1)
        match page.reports - entry.reports:
            case 0:
                page.new.add(-entry.tokens, -1)
            case 1:
                page.newish.add(-entry.tokens, -1)
            case _:
                page.gone.add(entry.tokens, 1)

    def reported(self, instance: Instance, report: Report) -> None:
        page = self._pages.setdefault(instance.dialed, _Page())
        page.reports += 1
        page.newish, page.new, page.gone = page.new, _Work(), _Work()
        page.own_then = _Work(page.own.tokens, page.own.requests)
        if instance.side is Side.PREFILL:
            tokens, rate = report.queued_tokens, report.prefill_rate
        else:
            tokens = max(instance.pages - report.free_pages, 0) * instance.page_size
            rate = float(instance.pages * instance.page_size)
        page.told = Load(tokens, report.requests, rate)

    def load_of(self, instance: Instance) -> Load:
        page = self._pages.get(instance.dialed)
        if page is None:
            return Load()
        if page.told is None:
            return Load(page.own.tokens, page.own.requests, 0.0, page.last_chosen)
        told = page.told
        return Load(
            _estimate(told.tokens, page.gone.tokens, page.new.tokens + page.newish.tokens, page.own.tokens,
                      page.own_then.tokens),
            _estimate(told.requests, page.gone.requests, page.new.requests + page.newish.requests, page.own.requests,
                      page.own_then.requests),
            told.rate,
            page.last_chosen,
        )  # fmt: skip

    def keep(self, known: Container[str]) -> None:
        """Forgets instances that are neither known any more nor owe an end."""
        for dialed in [d for d, page in self._pages.items() if d not in known and not page.own.requests]:
            del self._pages[dialed]


def _estimate(told: int, gone: int, new: int, own: int, own_then: int) -> int:
    return min(max(told - gone, 0) + new, own + max(told - own_then, 0))
