"""Shared by all tests: nothing heavy. One thread per process, as in production, and no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

HERE = Path(__file__).parent
CLUSTERS = "e2e"


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says what may run side by side (`make test` has two workers): one whole cluster at a time, and a file as a whole.

    The clusters take longest, so they begin."""
    for item in items:
        place = item.path.relative_to(HERE)
        group = CLUSTERS if place.parts[0] == CLUSTERS else str(place)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.path.relative_to(HERE).parts[0] != CLUSTERS)
