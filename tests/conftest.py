"""Shared by all tests: nothing heavy. One thread per process, as in production, and no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

CLUSTERS = "tests/e2e/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The clusters take longest, so they begin."""
    items.sort(key=lambda item: not item.nodeid.startswith(CLUSTERS))


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's, with a short name: sockets lie in it, and the kernel bounds their paths."""
    return tmp_path_factory.mktemp("t")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What may run side by side (`make test` has two workers): one whole cluster at a time, and files, each as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class OneClusterAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return CLUSTERS if nodeid.startswith(CLUSTERS) else nodeid.partition("::")[0]

    return OneClusterAtATime(config, log)
