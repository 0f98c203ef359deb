"""What Prometheus may know of an instance and its ranks.

In: the supervisor, and the last `StatusReport` of each rank. Out: metric families. Names begin with
`paceline_instance_` or, with a label `rank`, with `paceline_rank_`. Invariants: a counter falls only when the ranks
are restarted, which Prometheus knows as a reset; every counter a rank reports is in `COUNTERS` or `GAUGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pipeline.io.incarnation import RankView
from pipeline.io.instance_config import model_name
from pipeline.io.supervisor import Phase, Supervisor

_US = 1e-6


@dataclass(frozen=True, slots=True)
class _Shown:
    """How a counter of `StatusReport` is shown."""

    name: str
    help: str
    scale: float = 1.0


COUNTERS = {
    "entries_applied": _Shown("log_entries", "Log entries applied"),
    "ballots_opened": _Shown("ballots_opened", "Ring ballots opened by applied entries"),
    "verdicts": _Shown("ballots_decided", "Verdicts of ring ballots applied"),
    "ticks": _Shown("ticks", "Microbatches launched"),
    "compute_us": _Shown("compute_seconds", "Time the executor computed", _US),
    "hidden_wait_us": _Shown("hidden_wait_seconds", "Time the executor waited for the rank before it", _US),
    "in_flight_us": _Shown("in_flight_seconds", "Time with at least one microbatch launched and not harvested", _US),
    "prompt_tokens_computed": _Shown("prompt_tokens", "Prompt tokens whose KV was computed"),
    "tokens_generated": _Shown("generation_tokens", "Output tokens generated"),
    "requests_ended": _Shown("requests_ended", "Attempts that left"),
    "retracted": _Shown("retractions", "Times a request's KV was moved to host memory"),
    "resumed": _Shown("retractions_undone", "Times a request's KV came back from host memory"),
    "kv_bytes_sent": _Shown("kv_sent_bytes", "Bytes of KV the transfer backend wrote into decode ranks"),
    "transfer_us": _Shown("kv_transfer_seconds", "Time of all hand-overs together, first write to the last proof", _US),
    "transfers_done": _Shown("kv_transfers_done", "Hand-overs of KV that worked"),
    "transfers_failed": _Shown("kv_transfers_failed", "Hand-overs of KV that failed"),
    "handles_failed": _Shown("kv_writes_failed", "Writes of the transfer backend that failed"),
    "slices_sent_again": _Shown("kv_slices_sent_again", "Slices written once more because they had arrived damaged"),
    "slices_damaged": _Shown("kv_slices_damaged", "Slices whose checksum was wrong"),
    "engine_replacements": _Shown("transfer_engine_replacements", "Transfer engines replaced"),
    "frames_dropped": _Shown("frames_dropped", "Frames that were malformed, stale, or from nobody known"),
    "recordings_lost": _Shown("flight_recordings_lost", "Segments of the flight recorder lost for want of disk"),
}
GAUGES = {"host_bytes": _Shown("host_kv_bytes", "Host memory that holds KV of retracted requests")}


class InstanceCollector(Collector):
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.silent: set[int] = set()  # ranks that did not answer the last question

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        supervisor = self._supervisor
        current = supervisor.incarnation
        yield from self._instance()
        views = current.ranks if current else []
        silent = self.silent
        yield _by_rank("up", "1: the rank answers", views, lambda view: view.report and view.config.rank not in silent)
        reported = [view for view in views if view.report is not None]
        for field, name, text in (
            ("applied_seq", "applied_sequence", "The last log entry applied"),
            ("last_progress_s", "last_progress_seconds", "Since the rank last applied an entry"),
            ("audit", "page_audit_failed", "1: a page is not in exactly one place"),
            ("rooms", "rooms", "Hand-overs the transfer side knows"),
            ("store_entries", "store_entries", "Entries of the consensus store"),
            ("transfer_handles", "kv_writes_in_flight", "Writes submitted to the transfer backend and not over"),
        ):
            yield _by_rank(name, text, reported, attrgetter(f"report.{field}"))
        for field, name, text, label in (
            ("pages", "kv_pages", "Pages of the KV pool by state", "state"),
            ("requests", "requests", "Attempts by state of their lifecycle", "state"),
            ("queues", "queue_length", "Length of every queue of the rank", "queue"),
        ):
            family = GaugeMetricFamily(f"paceline_rank_{name}", text, labels=["rank", label])
            for view in reported:
                for what, count in getattr(view.report, field).items():
                    family.add_metric([str(view.config.rank), what], count)
            yield family
        yield from _counted(reported)

    def _instance(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        supervisor = self._supervisor
        config, current = supervisor.config, supervisor.incarnation
        info = GaugeMetricFamily(
            "paceline_instance_info", "Always 1", labels=["instance_id", "role", "model_name", "transfer_backend"]
        )
        info.add_metric([config.instance, config.role, model_name(config), current.backend if current else ""], 1)
        yield info
        serving = supervisor.phase is Phase.SERVING and not supervisor.stalled
        yield GaugeMetricFamily("paceline_instance_serving", "1: it takes requests and gets on", float(serving))
        yield GaugeMetricFamily("paceline_instance_epoch", "Incarnation of its ranks", supervisor.epoch)
        yield GaugeMetricFamily(
            "paceline_instance_attempts_open", "Attempts known and not ended", len(supervisor.attempts)
        )
        yield CounterMetricFamily("paceline_instance_restarts", "Times its ranks were restarted", supervisor.restarts)
        yield CounterMetricFamily(
            "paceline_instance_divergences", "Restarts because two ranks disagreed", supervisor.divergences
        )
        yield CounterMetricFamily(
            "paceline_instance_frames_dropped", "Frames of ranks that the daemon could not use",
            current.frames_dropped if current else 0,
        )  # fmt: skip


def _by_rank(name: str, text: str, views: list[RankView], read: Callable[[RankView], Any]) -> GaugeMetricFamily:
    """What is no number counts as whether it is there."""
    family = GaugeMetricFamily(f"paceline_rank_{name}", text, labels=["rank"])
    for view in views:
        value = read(view)
        family.add_metric([str(view.config.rank)], value if isinstance(value, int | float) else bool(value))
    return family


def _counted(reported: list[RankView]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    for table, kind in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
        for counter, shown in table.items():
            family = kind(f"paceline_rank_{shown.name}", shown.help, labels=["rank"])
            for view in reported:
                if view.report is not None and counter in view.report.counters:
                    family.add_metric([str(view.config.rank)], view.report.counters[counter] * shown.scale)
            yield family
    bubble = CounterMetricFamily(
        "paceline_rank_bubble_seconds", "Work in flight, and nothing computed", labels=["rank"]
    )
    for view in reported:
        if view.report is not None and "in_flight_us" in (counted := view.report.counters):
            # The two are read at different moments, so the difference may be below zero by a batch under way.
            idle = max(0, counted["in_flight_us"] - counted["compute_us"])
            bubble.add_metric([str(view.config.rank)], idle * _US)
    yield bubble
