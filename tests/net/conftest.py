"""Every test of this folder needs hosts of its own; where none can be made it is skipped, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path as FilePath

import pytest

from tests.net.lab import Lab, missing
from tests.net.ranks import Cast
from tests.net.switch import Path
from transfer.io.engine import BACKENDS

Stage = Callable[..., Cast]


@pytest.fixture(scope="session")
def _hosts() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)


@pytest.fixture(params=["mooncake", "nixl", "stream"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param not in BACKENDS:
        pytest.skip(f"there is no transfer backend {request.param!r}")
    return str(request.param)


@pytest.fixture
def stage(_hosts: None, backend: str, tmp_path: FilePath) -> Iterator[Stage]:
    """`stage(path, *hosts)`: hosts with that path between them; gone after the test, however it ends."""
    with ExitStack() as labs:

        def build(path: Path, *hosts: str) -> Cast:
            return Cast(labs.enter_context(Lab(hosts, path)), backend, tmp_path)

        yield build
