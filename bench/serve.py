"""`paceline bench serve`: one run against one server, shown and kept. Exit code 1 if no answer was whole."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.load import Progress
from bench.records import write_records
from bench.run import Run, RunError, run
from bench.show import live_line, table, warnings
from bench.summary import Summary, Window, steady_state, summarise, whole_run

_PRIVATE = frozenset({"api_key", "run", "command", "measure"})  # not in the record of a run's options


def serve(options: argparse.Namespace) -> int:
    if options.report is not None:
        check_plots()
    finished, summary = measured(options)
    print("\n".join(table(summary)))
    keep(options, finished, summary)
    return 0 if summary.completed else 1


def measured(options: argparse.Namespace, warm: Callable[[], None] | None = None) -> tuple[Run, Summary]:
    """Runs the load; ends the command with a message if that cannot be. `warm` is called when the warm-up is over."""
    live = options.progress and sys.stderr.isatty()
    began = time.monotonic()

    def watch(progress: Progress) -> None:
        print(f"\r{live_line(time.monotonic() - began, progress)}\033[K", end="", file=sys.stderr, flush=True)

    try:
        finished = asyncio.run(run(options, options.url, options.seed, watch if live else None, warm))
        summary = summarise(finished.records, window_of(options.window, finished), dict(options.slo))
    except (RunError, ValueError) as error:
        raise SystemExit(f"paceline bench: {error}") from error
    finally:
        if live:
            print(file=sys.stderr)
    held_back = options.max_in_flight is not None
    for warning in warnings(summary, finished.records, finished.open_loop, finished.left_out, held_back):
        print(f"note: {warning}", file=sys.stderr)
    return finished, summary


def window_of(kind: str, finished: Run) -> Window:
    return steady_state(finished.records) if kind == "steady" else whole_run(finished.records)


def keep(options: argparse.Namespace, finished: Run, summary: Summary, further: dict[str, Any] | None = None) -> None:
    """Writes what was asked for: summary, records, report."""
    told = {name: plain(value) for name, value in vars(options).items() if name not in _PRIVATE}
    head = {"model": finished.model, "open_loop": finished.open_loop, "options": told}
    if options.json is not None:
        body = {**head, "summary": summary, **(further or {})}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")
    if options.records is not None:
        write_records(options.records, finished.records)
    if options.report is not None:
        from bench.report import page

        options.report.write_text(page(finished.records, summary, head))


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def check_plots() -> None:
    """Before the run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SystemExit("paceline bench: --report needs matplotlib: `make setup` installs it") from None
