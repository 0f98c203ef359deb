"""The checking tools, fetched once per machine, and every variant of the chart, rendered once per run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deploy import tools
from tests.deploy.variants import EXTRAS, MATRIX, OLD, render


@pytest.fixture(scope="session")
def toolbox() -> tools.Tools:
    return tools.ensure()


@pytest.fixture(scope="session")
def helm(toolbox: tools.Tools) -> Path:
    return toolbox.helm


@pytest.fixture(scope="session")
def rendered(helm: Path) -> dict[str, list[dict[str, Any]]]:
    """Of every variant for a cluster of today."""
    return {name: render(helm, values) for name, values in (MATRIX | EXTRAS).items()}


@pytest.fixture(scope="session")
def rendered_old(helm: Path) -> dict[str, list[dict[str, Any]]]:
    """Of every variant for Kubernetes 1.20."""
    return {name: render(helm, values) for name, values in OLD.items()}
