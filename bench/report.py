"""The HTML report of a run: one file, plots as inline SVG, nothing fetched.

In: records, their summary, what the run was. Out: the page as text. Same records, same page.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
import msgspec
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Record
from bench.show import NAMES, table
from bench.summary import Summary, of_request

_STYLE = (
    "body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "svg{max-width:100%;height:auto}pre{overflow:auto}"
)
_RED, _BLUE = "#cf222e", "#0969da"


def page(records: Sequence[Record], summary: Summary, about: dict[str, Any]) -> str:
    title = escape(f"{about['model']}: {summary.completed} of {summary.requests} requests")
    options = escape(msgspec.json.format(msgspec.json.encode(about), indent=1).decode())
    plots = "\n".join(
        as_svg(lambda figure, draw=draw: draw(figure, records, summary), (9, 3.2), draw.__name__)  # type: ignore[misc]
        for draw in (_over_time, _shares, _throughput, _in_flight)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><pre>{escape(chr(10).join(table(summary)))}</pre>\n{plots}\n"
        f"<h2>How it was run</h2><pre>{options}</pre></html>\n"
    )


def as_svg(draw: Callable[[Figure], None], size: tuple[float, float], salt: str = "plot") -> str:
    """One `<svg>` element. `salt` keeps its ids apart from those of others on the page, and equal from run to run."""
    with mpl.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _over_time(figure: Figure, records: Sequence[Record], summary: Summary) -> None:
    axes: Axes = figure.subplots()
    firsts = [(record.scheduled, 1e3 * ttft) for record in records if (ttft := record.ttft) is not None]
    axes.plot(*_columns(firsts), ".", color=_BLUE, markersize=4, label="TTFT")
    for record in records:
        if not record.ok:
            axes.axvline(record.scheduled, color=_RED, linewidth=0.5)
    axes.set(title="TTFT against the scheduled moment (red: failed)", xlabel="s", ylabel="ms", ylim=(0, None))
    _over_run(axes, records, summary)


def _shares(figure: Figure, records: Sequence[Record], summary: Summary) -> None:
    good = [record for record in records if record.ok and _inside(record.scheduled, summary)]
    each = [of_request(record) for record in good]
    values = {name: [found[name] for found in each if name in found] for name in ("ttft", "tpot", "e2e")}
    values["itl"] = [1e3 * gap for record in good for gap in record.gaps]
    for axes, name in zip(figure.subplots(1, 4), ("ttft", "tpot", "itl", "e2e"), strict=True):
        if values[name]:
            axes.ecdf(values[name], color=_BLUE)
        axes.set(title=NAMES[name], xlabel="ms", ylim=(0, 1))


def _throughput(figure: Figure, records: Sequence[Record], summary: Summary) -> None:
    axes: Axes = figure.subplots()
    moments = [at for record in records for at, _ in record.chunks]
    weights = [tokens for record in records for _, tokens in record.chunks]
    if moments:
        width = max(summary.window.end / 100, 0.1)
        edges = numpy.arange(0, max(moments) + width, width)
        counted, _ = numpy.histogram(moments, edges, weights=weights)
        axes.stairs(counted / width, edges, color=_BLUE)
    axes.set(title="Output tokens per second", xlabel="s", ylim=(0, None))
    _over_run(axes, records, summary)


def _in_flight(figure: Figure, records: Sequence[Record], summary: Summary) -> None:
    axes: Axes = figure.subplots()
    for begin, label, colour in (("scheduled", "due and not ended", _RED), ("sent", "sent and not ended", _BLUE)):
        steps = sorted([(getattr(r, begin), 1) for r in records] + [(r.ended, -1) for r in records])
        if steps:
            moments, changes = zip(*steps, strict=True)
            axes.step(moments, numpy.cumsum(changes), where="post", label=label, color=colour, linewidth=1)
    axes.set(title="Requests in flight", xlabel="s", ylim=(0, None))
    _over_run(axes, records, summary)
    axes.legend()


def _over_run(axes: Axes, records: Sequence[Record], summary: Summary) -> None:
    """Plots over time have one axis, and shade what counts if that is not all."""
    axes.set_xlim(0, max((record.ended for record in records), default=1.0))
    if summary.window.kind != "all":
        axes.axvspan(summary.window.begin, summary.window.end, color="#ddf4ff", zorder=0)
        axes.set_xlabel("s (shaded: the window that counts)")


def _inside(moment: float, summary: Summary) -> bool:
    return summary.window.begin <= moment < summary.window.end


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]
