"""The engine without disaggregation gives the tokens of transformers' generate, in batches of prompts and answers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import pytest
import torch

from bench.undivided_engine import Params, Request, UndividedEngine
from engine.batch import Row
from engine.model_spec import read_spec
from engine.sampler import sample
from engine.stage import Stage, StageOutput
from tests.engine.tiny_models import NEW_TOKENS, VOCAB, greedy, save_tiny

PAGES, PAGE_SIZE = 24, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[tuple[int, ...]], list[int]]:
    torch.set_num_threads(1)
    model = save_tiny("llama", folder)
    return lambda prompt: greedy(model, list(prompt), NEW_TOKENS)


class WatchedStage(Stage):
    """Notes how many tokens each row of each forward has."""

    def forward(self, rows: Sequence[Row], hidden: torch.Tensor | None = None) -> StageOutput:
        self.taken = [*getattr(self, "taken", []), [len(row.tokens) for row in rows]]
        return super().forward(rows, hidden)


@pytest.fixture
def stage(folder: Path, reference: object) -> WatchedStage:
    stage = WatchedStage.load(folder, range(read_spec(folder).layers), PAGES, PAGE_SIZE)
    assert isinstance(stage, WatchedStage)
    return stage


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((17 * length + 29 * place) % VOCAB for place in range(length))


def drive(engine: UndividedEngine, answers: dict[Hashable, list[int]]) -> None:
    for token in engine.step():
        answer = answers.setdefault(token.key, [])
        assert token.position == len(answer)
        answer.append(token.chosen.token)


def test_mixed_batches_give_the_tokens_of_transformers(
    stage: WatchedStage, reference: Callable[[tuple[int, ...]], list[int]]
) -> None:
    engine = UndividedEngine(stage, sample, chunk_size=8)
    answers: dict[Hashable, list[int]] = {}
    lengths = (5, 37, 20, 1)
    for length in lengths:  # one more at every step: chunks of some run beside the answers of others
        engine.add(Request(length, prompt_of(length), NEW_TOKENS))
        drive(engine, answers)
    while engine.busy:
        drive(engine, answers)

    assert answers == {length: reference(prompt_of(length)) for length in lengths}
    assert any(1 in counts and max(counts) > 1 for counts in stage.taken)
    assert engine.free_pages == PAGES


def test_a_step_takes_every_answer_and_no_more_of_prompts_than_a_chunk(stage: WatchedStage) -> None:
    engine = UndividedEngine(stage, sample, chunk_size=8)
    engine.add(Request("a", prompt_of(3), 9))
    engine.add(Request("b", prompt_of(12), 2))
    engine.add(Request("c", prompt_of(3), 2))
    while engine.busy:
        engine.step()

    assert stage.taken[:4] == [[3, 5], [1, 7, 1], [1, 1, 2], [1, 1]]


def test_a_request_that_does_not_fit_waits_for_pages_and_a_cancelled_one_gives_its_own_back(stage: Stage) -> None:
    engine = UndividedEngine(stage, sample)
    engine.add(Request("large", prompt_of(60), 21))  # 80 positions: 20 of 24 pages
    engine.add(Request("waits", prompt_of(20), 5))  # 6 pages
    assert {token.key for token in engine.step()} == {"large"}
    assert {token.key for token in engine.step()} == {"large"}
    assert engine.free_pages == PAGES - 20

    engine.cancel("large")
    assert {token.key for token in engine.step()} == {"waits"}
    engine.cancel("waits")
    engine.cancel("never here")

    assert engine.free_pages == PAGES
    assert not engine.busy
    assert engine.step() == []


def test_answers_end_at_stop_ids_but_not_before_min_tokens(
    stage: Stage, reference: Callable[[tuple[int, ...]], list[int]]
) -> None:
    expected = reference(prompt_of(5))
    stop = expected[3]
    assert stop not in expected[:3]
    engine = UndividedEngine(stage, sample)
    engine.add(Request("stops", prompt_of(5), NEW_TOKENS, stop_ids=(stop,)))
    engine.add(Request("goes on", prompt_of(5), 5, min_tokens=5, stop_ids=(stop,)))
    found = []
    while engine.busy:
        found += engine.step()

    assert [(t.position, t.finish) for t in found if t.key == "stops" and t.finish] == [(3, "stop")]
    assert [(t.position, t.finish) for t in found if t.key == "goes on" and t.finish] == [(4, "length")]
    assert stop not in [t.chosen.token for t in found if t.key == "goes on"][:4]


def test_sampled_tokens_depend_on_seed_and_position_alone(stage: Stage) -> None:
    def answer(chunk: int, beside: bool) -> list[int]:
        engine = UndividedEngine(stage, sample, chunk_size=chunk)
        engine.add(Request("own", prompt_of(9), 8, Params(temperature=1.0, seed=5)))
        if beside:
            engine.add(Request("other", prompt_of(20), 8, Params(temperature=1.0, seed=6)))
        found: dict[Hashable, list[int]] = {}
        while engine.busy:
            drive(engine, found)
        return found["own"]

    assert answer(512, beside=False) == answer(4, beside=True)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("a", (), 1), "at least one token"),
        (Request("a", (1,), 0), "max_tokens"),
        (Request("a", prompt_of(90), 8), "need 25 pages, the pool has 24"),
    ],
)
def test_what_can_never_run_is_refused(stage: Stage, request_: Request, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        UndividedEngine(stage, sample).add(request_)


def test_a_key_in_use_and_a_part_of_a_model_are_refused(stage: Stage, folder: Path) -> None:
    engine = UndividedEngine(stage, sample)
    engine.add(Request("a", (1,), 1))
    with pytest.raises(ValueError, match="here already"):
        engine.add(Request("a", (1,), 1))
    with pytest.raises(ValueError, match=r"layers 0\.\.1 are not the whole model"):
        UndividedEngine(Stage.load(folder, range(2), PAGES, PAGE_SIZE), sample)
