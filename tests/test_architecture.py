"""The rules of the house hold, and each of them can fail.

Every import contract and every ban of the purity check is shown once to break, on a small copy of
the house with one bad line planted in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from lint.purity import PURE_GATEWAY, check_tree

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = [contract["id"] for contract in PYPROJECT["tool"]["importlinter"]["contracts"]]

HOUSE = """
consensus consensus.log consensus.io consensus.io.store_socket
pipeline pipeline.replica pipeline.local pipeline.rank pipeline.io pipeline.io.driver
prefill prefill.scheduler prefill.io prefill.io.daemon
decode decode.scheduler decode.io decode.io.daemon
transfer transfer.sender transfer.io transfer.io.nixl
engine engine.stage
telemetry telemetry.spans
sim sim.world
bench bench.serve
paceline paceline.cli
paceline_proto paceline_proto.v1
security security.channels
""".split()

ALLOWED = {
    "paceline.cli": "import prefill.io.daemon, gateway.app, torch",
    "sim.world": "import random, pipeline.rank, prefill.scheduler",
    "bench.serve": "import paceline_proto.v1, asyncio",
    "prefill.scheduler": "import pipeline.replica, consensus.log, transfer.sender",
    "prefill.io.daemon": "import pipeline.io.driver, engine.stage, time, grpc, paceline_proto.v1",
    "pipeline.io.driver": "import consensus.io.store_socket, transfer.io.nixl, pipeline.rank, security.channels, zmq, os",
    "engine.stage": "import torch, time",
}

# Contract, module, the line planted there.
BREACHES = [
    ("layers", "consensus.log", "import pipeline.rank"),
    ("layers", "prefill.scheduler", "import decode.scheduler"),
    ("layers", "decode.io.daemon", "import prefill.io.daemon"),
    ("layers", "pipeline.io.driver", "import engine.stage"),
    ("layers", "engine.stage", "import pipeline.rank"),
    ("layers", "transfer.sender", "import consensus.log"),
    ("layers", "telemetry.spans", "import gateway.app"),
    ("layers", "bench.serve", "import paceline.cli"),
    ("layers", "gateway.app", "import sim.world"),
    ("layers", "security.channels", "import paceline_proto.v1"),
    ("layers", "security.channels", "import transfer.sender"),
    ("gateway", "gateway.app", "import transfer.sender"),
    ("gateway", "gateway.router", "import consensus.log"),
    ("bench", "bench.serve", "import gateway.app"),
    ("sim", "sim.world", "import pipeline.io.driver"),
    ("sim", "sim.world", "import engine.stage"),
    *(("pure", "pipeline.rank", f"import {name}") for name in
      "time random socket threading asyncio os logging zmq grpc torch paceline_proto.v1 security.channels".split()),
    ("pure", "transfer.sender", "from time import monotonic"),
    ("pure", "decode.scheduler", "import engine.stage"),
    ("pure-gateway", "gateway.policies", "import random"),
    ("io", "pipeline.rank", "import pipeline.io.driver"),
    ("io", "gateway.app", "import transfer.io.nixl"),
    ("io", "sim.world", "import prefill.io.daemon"),
    ("replica", "pipeline.replica", "import pipeline.local"),
    ("replica", "pipeline.replica", "import pipeline.rank"),
]  # fmt: skip


def gateway_modules() -> list[str]:
    """Those that a contract names must exist in the copy as well."""
    named = [c["source_modules"] for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["id"] == "pure-gateway"]
    return ["gateway", "gateway.app", *named[0]]


def test_both_checks_hold_the_same_gateway_modules_pure() -> None:
    assert gateway_modules()[2:] == [f"gateway.{name}" for name in PURE_GATEWAY]


def build_house(root: Path, planted: dict[str, str]) -> Path:
    for module in [*HOUSE, *gateway_modules()]:
        folder = module in {"paceline_proto.v1"} or "." not in module or module.endswith(".io")
        path = root / Path(*module.split(".")) / "__init__.py" if folder else root / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(planted.get(module, "") + "\n")
    return root


def lint_imports(root: Path, contract: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-logo"]
    command += ["--no-cache", str(ROOT / "pyproject.toml"), *(["--contract", contract] if contract else [])]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_a_house_in_order_keeps_every_contract(tmp_path: Path) -> None:
    done = lint_imports(build_house(tmp_path, ALLOWED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"Contracts: {len(CONTRACTS)} kept, 0 broken", done.stdout)


@pytest.mark.parametrize(("contract", "module", "line"), BREACHES)
def test_each_contract_can_break(contract: str, module: str, line: str, tmp_path: Path) -> None:
    # `rank` reaches `local`, so that `replica` importing `rank` is an indirect breach.
    planted = ALLOWED | {"pipeline.rank": "import pipeline.local", module: line}
    done = lint_imports(build_house(tmp_path, planted), contract)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout
    assert module in done.stdout


def test_every_contract_is_shown_to_break() -> None:
    assert {breach[0] for breach in BREACHES} == set(CONTRACTS)


BANNED = [
    ("import time", "imports time"),
    ("from os import path", "imports os"),
    ("import zmq.asyncio", "imports zmq.asyncio"),
    ("from paceline_proto.v1 import admin_pb2", "imports paceline_proto.v1"),
    ("import datetime", "imports datetime"),
    ("import pipeline.io.driver", "the shell pipeline.io.driver"),
    ("x = __import__('time')", "by name at run time"),
    ("x = hash('a')", "hash()"),
    ("x = {id(o): o for o in []}", "id()"),
    ("for x in {1, 2}: pass", "iterates over a set"),
    ("x = [a for a in set([1])]", "iterates over a set"),
    ("x = {a: 1 for a in frozenset([1])}", "iterates over a set"),
    ("x = list({1, 2})", "list() of a set"),
    ("s = set()\nx = tuple(s)", "tuple() of a set"),
    ("x = ','.join({'a'})", "join() of a set"),
    ("x = dict.fromkeys({'a'})", "fromkeys() of a set"),
    ("x = [*{1, 2}]", "unpacks a set"),
    ("x, y = {1, 2}", "unpacks a set"),
    ("x = next(iter({1, 2}))", "iter() of a set"),
    ("s = {1}\nx = s.pop()", "pop() of a set"),
    ("x = min({1}, key=str)", "min() with a key of a set"),
    ("x = sorted({1}, key=str)", "sorted() with a key of a set"),
    ("d = {}\nfor x in d.keys() - {1}: pass", "iterates over a set"),
    ("def f(s: set[int]) -> None:\n    for x in s: pass", "iterates over a set"),
    ("def f(s: 'frozenset[int] | None') -> None:\n    for x in s or (): pass", "iterates over a set"),
    ("class A:\n    held: set[int]\ndef f(a: A) -> None:\n    for x in a.held: pass", "iterates over a set"),
    ("class A:\n    def __init__(self) -> None:\n        self.held = set()\n        y = [*self.held]", "unpacks a set"),
    ("def f(s: set[int]):\n    yield from s.union([1])", "yields from a set"),
    ("def f():\n    s = {1} | {2}\n    return (x for x in s)", "iterates over a set"),
]

FINE = [
    "for x in sorted({2, 1}): pass",
    "x = len({1}) + sum(1 for _ in range(3))",
    "x = 1 in {1, 2}",
    "s = {1}\nx = any(a > 1 for a in s)",
    "s = {1}\nx = {a + 1 for a in s}",
    "s = {1}\nx = sorted(a + 1 for a in s)",
    "s = {1}\nx = max(s)",
    "s = {1}\nfor x in s: pass  # set-order: nothing depends on it",
    "def f(s: list[int]) -> None:\n    for x in s: pass",
    "s = {1}\ndef f(s: list[int]) -> None:\n    for x in s: pass",
    "d = {1: 2}\nx = list(d)\ny = d.pop(1)",
    "import msgspec\nfrom collections import deque",
    "class A:\n    def hash(self) -> int: return self.hash()",
]


@pytest.mark.parametrize(("snippet", "finding"), BANNED)
def test_each_ban_can_be_broken(snippet: str, finding: str, tmp_path: Path) -> None:
    file = tmp_path / "consensus" / "planted.py"
    file.parent.mkdir()
    file.write_text(snippet + "\n")
    findings = check_tree(tmp_path)
    assert findings, snippet
    assert any(finding in str(found) for found in findings), findings


@pytest.mark.parametrize("snippet", FINE)
def test_what_is_in_order_is_left_alone(snippet: str, tmp_path: Path) -> None:
    file = tmp_path / "consensus" / "fine.py"
    file.parent.mkdir()
    file.write_text(snippet + "\n")
    assert check_tree(tmp_path) == []


def test_shells_may_do_what_pure_modules_may_not(tmp_path: Path) -> None:
    file = tmp_path / "pipeline" / "io" / "driver.py"
    file.parent.mkdir(parents=True)
    file.write_text("import time\nfor x in {1}: pass\n")
    assert check_tree(tmp_path) == []


def test_the_simulator_may_play_with_chance_but_not_with_order(tmp_path: Path) -> None:
    file = tmp_path / "sim" / "world.py"
    file.parent.mkdir()
    file.write_text("import random\nfor x in {1}: pass\nimport socket\n")
    assert [found.line for found in check_tree(tmp_path)] == [2, 3]


def test_our_names_are_not_those_of_installed_packages() -> None:
    ours = {package.split(".")[0] for package in PYPROJECT["tool"]["setuptools"]["packages"]}
    theirs = {
        name: distributions
        for name, distributions in metadata.packages_distributions().items()
        if any(distribution.lower() != "paceline" for distribution in distributions)
    }
    assert {name: theirs[name] for name in ours if name in theirs} == {}


def test_every_package_folder_is_listed() -> None:
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    roots = {name.split(".")[0] for name in listed} - {"paceline_proto"}
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for root in roots for path in (ROOT / root).rglob("__init__.py")
    }
    assert found == listed - {"paceline_proto", "paceline_proto.v1"}
