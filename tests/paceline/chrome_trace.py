"""What Perfetto requires of a trace in Chrome's JSON format, as its documentation says."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def check_trace(made: dict[str, Any]) -> None:
    """Every event is well formed; complete events of a row nest; asynchronous ones come in pairs."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    open_ids: dict[tuple[str, str], int] = {}
    for event in made["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index") and event["args"], event
            continue
        assert isinstance(event["ts"], int) and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0, event
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t"), event
        elif event["ph"] == "b":
            open_ids[event["cat"], event["id"]] = event["ts"]
        else:
            assert event["ph"] == "e", event
            assert open_ids.pop((event["cat"], event["id"])) <= event["ts"], event
    assert not open_ids, "asynchronous events that never end"
    for row, spans in rows.items():
        inside: list[tuple[int, int]] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while inside and inside[-1][1] <= begin:
                inside.pop()
            assert not inside or end <= inside[-1][1], f"overlap without nesting in {row}: {inside[-1]}, {(begin, end)}"
            inside.append((begin, end))
