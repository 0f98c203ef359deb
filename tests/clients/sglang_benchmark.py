"""Starts SGLang's serving benchmark where SGLang's runtime is not installed.

In: the benchmark's own command line. Out: what `python -m sglang.benchmark.serving` gives. The package's
`__init__` and two names the benchmark imports from the runtime would need CUDA packages; they stand in here.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def stand_in(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def main() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations is not None, "sglang is not installed here"
    stand_in("sglang").__path__ = list(found.submodule_search_locations)
    for name in ("sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"):
        stand_in(name).__path__ = []
    stand_in("sglang.srt.disaggregation.utils", FAKE_BOOTSTRAP_HOST="2.2.2.2")
    stand_in(
        "sglang.srt.utils.network",
        resolve_base_url=lambda base_url, host, port: base_url or f"http://{host}:{port}",
        resolve_host_port=lambda base_url, host, port: base_url or f"{host}:{port}",
    )
    from sglang.benchmark.serving import cli_main  # type: ignore[import-not-found]

    cli_main()


main()
