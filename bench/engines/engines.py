"""The engines by name: how each one's process is started, and in which cases it is measured.

Ours and transformers run in this environment, in which transformers is the tests' reference; the others have folders of
their own (`bench.engines.install`).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.engines.cases import CASES
from bench.engines.install import LLAMA_CPP_MODEL

HERE = Path(__file__).parent
OURS = "paceline"


def peers_folder() -> Path:
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline") / "peers"


@dataclass(frozen=True, slots=True)
class Engine:
    """`command` has `{model}` where the model's folder goes. `judged`: ours must not be slower than this one."""

    command: tuple[str, ...]
    cases: tuple[str, ...] = tuple(CASES)
    judged: bool = True


def _module(name: str, *options: str, python: str = sys.executable) -> tuple[str, ...]:
    return (python, "-m", f"bench.engines.{name}", "{model}", *options)


def engines(peers: Path) -> dict[str, Engine]:
    """`peers`: where `bench.engines.install` put the engines of other people."""
    node_modules = peers / "llama.cpp"
    return {
        OURS: Engine(_module("own"), judged=False),
        "vllm": Engine(_module("vllm_cpu", python=str(peers / "vllm" / "bin" / "python"))),
        # One at a time is the same with any number of requests, and a batch of one is not a batch.
        "hf-single": Engine(_module("hf", "single"), ("1", "ttft")),
        "hf-batched": Engine(_module("hf", "batched"), ("8", "32")),
        "hf-continuous": Engine(_module("hf", "continuous"), ("8", "32")),
        # It reads the default model only, in a file of its own.
        "llama.cpp": Engine(
            ("node", str(HERE / "llama_cpp.mjs"), str(node_modules / LLAMA_CPP_MODEL), str(node_modules)),
            ("1", "ttft"),
            judged=False,
        ),
    }
