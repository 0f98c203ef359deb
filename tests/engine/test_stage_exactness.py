"""In float32, greedy tokens equal those of transformers' generate, whatever the batch, chunks and split."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
import transformers

from engine.checkpoint import read_spec, split_layers
from engine.smollm2 import ensure_default_model
from engine.stage import Stage
from tests.engine.driver import PlainRow, Wish, generate, load_split, run_stages
from tests.engine.tiny_models import MODELS, NEW_TOKENS, Reference, greedy

SPLITS = {1: [(0, 4)], 2: [(0, 3), (3, 4)], 3: [(0, 1), (1, 2), (2, 4)]}
WHOLE_PROMPT = 1000


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_says_more_than_one_word(tiny: Callable[[str], Reference], name: str) -> None:
    # A model that repeats one token would agree with almost any mistake.
    for continuation in tiny(name).continuations:
        assert len(set(continuation)) >= 4


@pytest.mark.parametrize("parts", SPLITS)
@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_give_the_tokens_of_transformers(tiny: Callable[[str], Reference], name: str, parts: int) -> None:
    reference = tiny(name)
    for chunk, page_size in ((3, 4), (16, 16), (WHOLE_PROMPT, 16)):
        stages = load_split(reference.folder, SPLITS[parts], pages=64, page_size=page_size)
        assert generate(stages, reference.prompts, NEW_TOKENS, chunk) == reference.continuations


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_the_split_into_stages_changes_no_bits(tiny: Callable[[str], Reference], name: str) -> None:
    reference = tiny(name)
    pages = [list(range(who * 4, who * 4 + 4)) for who in range(4)]
    rows = [PlainRow(0, prompt, pages[who], Wish()) for who, prompt in enumerate(reference.prompts)]
    logits = [run_stages(load_split(reference.folder, split, 16, 16), rows) for split in SPLITS.values()]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_logits_come_for_the_rows_that_want_a_token_in_row_order(tiny: Callable[[str], Reference]) -> None:
    reference = tiny("llama")
    (stage,) = load_split(reference.folder, SPLITS[1], 16, 16)
    long, short = reference.prompts[0], reference.prompts[1]
    rows = [
        PlainRow(0, long, [0, 1, 2, 3], Wish()),
        PlainRow(0, long[:20], [4, 5, 6], None),
        PlainRow(0, short, [7], Wish()),
    ]
    logits = run_stages([stage], rows)
    assert logits.shape == (2, 128)
    assert logits.argmax(-1).tolist() == [reference.continuations[0][0], reference.continuations[1][0]]
    assert run_stages([stage], [rows[1]]).shape == (0, 128)


def test_a_request_continues_from_pages_that_another_one_wrote(tiny: Callable[[str], Reference]) -> None:
    reference = tiny("mistral-window")
    (stage,) = load_split(reference.folder, SPLITS[1], 16, 16)
    prompt = reference.prompts[0]
    run_stages([stage], [PlainRow(0, [*prompt[:32], 1, 2, 3], [5, 9, 2], None)])
    logits = run_stages([stage], [PlainRow(32, prompt[32:], [5, 9, 11, 12], Wish())])
    assert logits.argmax(-1).tolist() == reference.continuations[0][:1]


def test_pages_copied_by_region_address_continue_on_another_instance(tiny: Callable[[str], Reference]) -> None:
    # Given a prompt that a prefill instance of two stages has read
    reference = tiny("llama")
    prompt, continuation = reference.prompts[0], reference.continuations[0]
    prefill = load_split(reference.folder, SPLITS[2], 8, 16)
    run_stages(prefill, [PlainRow(0, prompt, [6, 1, 3], Wish())])
    # when its pages are copied, byte range by byte range, to other places of a decode instance of three stages
    decode = load_split(reference.folder, SPLITS[3], 12, 16)
    targets = {(region.layer, region.kind): region for stage in decode for region in stage.kv_pool.regions()}
    for source in (region for stage in prefill for region in stage.kv_pool.regions()):
        target, page_bytes = targets[source.layer, source.kind], 16 * source.bytes_per_token
        for from_page, to_page in zip([6, 1, 3], [0, 10, 4], strict=True):
            ctypes.memmove(target.address + to_page * page_bytes, source.address + from_page * page_bytes, page_bytes)
    # then the decode instance goes on with the same text
    text = [*prompt, continuation[0]]
    while len(text) < len(prompt) + NEW_TOKENS:
        row = PlainRow(len(text) - 1, text[-1:], [0, 10, 4, 7], Wish())
        text.append(int(run_stages(decode, [row]).argmax()))
    assert text[len(prompt) :] == continuation


def test_kv_of_each_layer_is_in_the_pool_when_the_stage_says_so(tiny: Callable[[str], Reference]) -> None:
    reference = tiny("qwen3")
    first, last = load_split(reference.folder, [(0, 2), (2, 4)], 4, 16)
    said: list[tuple[int, bool, bool]] = []

    def note(layer: int) -> None:
        keys = [last.kv_pool.keys(own)[2, : len(reference.prompts[1])] for own in (2, 3)]
        said.append((layer, bool(keys[0].ne(0).all()), bool(keys[1].ne(0).all())))

    rows = [PlainRow(0, reference.prompts[1], [2], Wish())]
    last.on_layer_written = note
    last.forward(rows, first.forward(rows).hidden)
    assert said == [(2, True, False), (3, True, True)]
    assert bool(last.kv_pool.keys(3)[0].eq(0).all()), "pages of nobody stay untouched"


def test_bfloat16_is_as_close_to_the_exact_answer_as_transformers(tiny: Callable[[str], Reference]) -> None:
    # Its own kinds of attention differ from each other by as much, so nothing can equal it.
    reference = tiny("qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.bfloat16)
    exact = transformers.AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.bfloat16).double()
    stage = Stage.load(reference.folder, range(4), 4, 16, dtype="bfloat16")
    ours, theirs = [], []
    for prompt in reference.prompts:
        with torch.inference_mode():
            expected, other = (either(torch.tensor([prompt])).logits[0, -1].double() for either in (exact, model))
        logits = run_stages([stage], [PlainRow(0, prompt, [0, 1, 2], Wish())])
        assert logits.dtype == torch.bfloat16
        ours.append(logits[0].double() - expected)
        theirs.append(other - expected)
    assert torch.cat(ours).norm() < 1.25 * torch.cat(theirs).norm()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (PlainRow(0, [], [0]), "row 0 has 0 tokens"),
        (PlainRow(14, [1, 2, 3], [0]), "position 16 and needs 2 pages, but has 1"),
        (PlainRow(0, [1], [4]), "outside 0..3"),
        (PlainRow(0, [1], [-1]), "outside 0..3"),
    ],
)
def test_rows_that_do_not_fit_the_pool_are_refused(
    tiny: Callable[[str], Reference], row: PlainRow, message: str
) -> None:
    (stage,) = load_split(tiny("llama").folder, SPLITS[1], 4, 16)
    with pytest.raises(ValueError, match=message):
        stage.forward([row])


def test_hidden_states_that_do_not_fit_the_rows_are_refused(tiny: Callable[[str], Reference]) -> None:
    first, last = load_split(tiny("llama").folder, SPLITS[2], 4, 16)
    rows = [PlainRow(0, [1, 2], [0], Wish())]
    hidden = first.forward(rows).hidden
    assert hidden is not None
    for wrong in (None, hidden[:1], hidden.to(torch.bfloat16)):
        with pytest.raises(ValueError, match=r"hidden states must be \[2, 64\] torch.float32"):
            last.forward(rows, wrong)
    with pytest.raises(ValueError, match="takes tokens"):
        first.forward(rows, hidden)


def test_the_default_model_gives_the_tokens_of_transformers() -> None:
    folder = ensure_default_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a small village by the sea,"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = [greedy(model, prompt, 16) for prompt in prompts]
    assert "Paris" in tokenizer.decode(expected[0])
    spec = read_spec(folder)
    for parts, chunk in ((1, WHOLE_PROMPT), (2, 4)):
        stages = load_split(folder, split_layers(spec, parts), pages=12, page_size=16)
        assert generate(stages, prompts, 16, chunk) == expected
