"""Row T7: KV of a real model of 30 layers from P stages to D stages through real ports and engines.

The prompt is computed chunk by chunk, and each layer of a chunk is sent while the next ones compute. Each byte of
each page is compared, and the tokens that the D stages go on with are those of transformers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import transformers

from engine.stage import Stage
from tests.engine.driver import PlainRow, Wish, run_stages
from tests.engine.tiny_models import Reference, greedy
from tests.transfer.rig import DECODE, PREFILL, REAL, Ports
from transfer.plan import Shard, Topology
from transfer.regions import RegionTable

LAYERS, VOCAB, NEW_TOKENS = 30, 128, 16
PAGE_SIZE, PAGES, CHUNK = 4, 24, 9
SRC_PAGES = [7, 8, 9, 2, 20, 21, 0, 3, 15]
DST_PAGES = [1, 2, 3, 11, 12, 5, 23, 22, 8, 9, 10, 0, 13, 14]  # the output's too
HEADS, HEAD_DIM = 2, 16

ALL = list(product(range(1, 5), repeat=2))
IN_FULL = ("mooncake", "stream")
FEW = [(1, 4), (3, 2), (4, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """Greedy choices stay far apart, also after 30 layers."""
    folder: Path = tmp_path_factory.mktemp("deep")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    made.save_pretrained(folder)
    choose = random.Random(3)
    prompt = [choose.randrange(VOCAB) for _ in range(35)]
    answer = greedy(made, prompt, NEW_TOKENS)
    assert len(set(answer)) >= 6, "a model that repeats itself would agree with almost any mistake"
    yield Reference(folder, [prompt], [answer])
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class StagePool:
    """A stage's KV in the words of `transfer`."""

    stage: Stage

    @property
    def address(self) -> int:
        return self.stage.kv_pool.base_address

    @property
    def nbytes(self) -> int:
        return self.stage.kv_pool.nbytes

    @property
    def descriptor(self) -> int | None:
        return self.stage.kv_pool.descriptor

    @property
    def regions(self) -> RegionTable:
        pool, layers = self.stage.kv_pool, self.stage.layers
        bases = tuple((pool.keys(layer).data_ptr(), pool.values(layer).data_ptr()) for layer in layers)
        span = (layers.start, layers.stop)
        return RegionTable(span, (0, HEADS), PAGES * PAGE_SIZE, (pool.bytes_per_token,) * len(layers), bases)


def load(model: Reference, ranks: int) -> tuple[list[Stage], Topology]:
    cuts = [LAYERS * rank // ranks for rank in range(ranks + 1)]
    stages = [Stage.load(model.folder, range(*part), PAGES, PAGE_SIZE, shared=True) for part in pairwise(cuts)]
    shards = tuple(Shard(rank, part, (0, HEADS)) for rank, part in enumerate(pairwise(cuts)))
    return stages, Topology.uniform(shards, PAGE_SIZE, 2 * stages[0].kv_pool.bytes_per_token)


def prefill(ports: Ports, stages: list[Stage], room: str, prompt: list[int], push: str) -> int:
    """The first token; when this returns, KV may still be on its way."""
    logits = None
    for start in range(0, len(prompt), CHUNK):
        tokens = prompt[start : start + CHUNK]
        end = start + len(tokens)
        row = PlainRow(start, tokens, SRC_PAGES, Wish(position=end) if end == len(prompt) else None)
        hidden = None
        for rank, stage in enumerate(stages):

            def written(layer: int, rank: int = rank, start: int = start, end: int = end) -> None:
                ports.note(PREFILL, rank, ports.senders[rank].written(room, start, end, (layer, layer + 1)))

            stage.on_layer_written = written if push == "layer" else None
            output = stage.forward([row], hidden)
            if push == "chunk":
                layers = (stage.layers.start, stage.layers.stop)
                ports.note(PREFILL, rank, ports.senders[rank].written(room, start, end, layers))
            hidden, logits = output.hidden, output.logits
            ports.turn(0)
    assert logits is not None
    return int(logits[0].argmax())


def assert_same_bytes(sources: list[Stage], targets: list[Stage], tokens: int) -> None:
    """Each layer and page of the prompt is as at the source; nothing else in the target's pools was touched."""
    of_source = {layer: stage for stage in sources for layer in stage.layers}
    for stage in targets:
        for layer in stage.layers:
            for kind in ("keys", "values"):
                sent = getattr(of_source[layer].kv_pool, kind)(layer)
                landed = getattr(stage.kv_pool, kind)(layer)
                untouched = torch.ones(PAGES, PAGE_SIZE, dtype=torch.bool)
                for number, (src, dst) in enumerate(zip(SRC_PAGES, DST_PAGES, strict=False)):
                    held = min(PAGE_SIZE, tokens - number * PAGE_SIZE)
                    a, b = sent[src, :held].view(torch.uint8), landed[dst, :held].view(torch.uint8)
                    assert torch.equal(a, b) and bool(a.any()), f"{kind} of layer {layer}, page {number}"
                    untouched[dst, :held] = False
                assert not bool(landed[untouched].view(torch.uint8).any()), f"{kind} of layer {layer}, elsewhere"


def decode(stages: list[Stage], prompt: list[int], first: int) -> list[int]:
    tokens = [first]
    while len(tokens) < NEW_TOKENS:
        position = len(prompt) + len(tokens) - 1
        row = PlainRow(position, tokens[-1:], DST_PAGES, Wish(position=position + 1))
        tokens.append(int(run_stages(stages, [row])[0].argmax()))
    return tokens


def check(model: Reference, backend: str, p: int, d: int, push: str = "layer") -> None:
    prompt = model.prompts[0]
    assert len(SRC_PAGES) == -(-len(prompt) // PAGE_SIZE)
    (sources, source), (targets, destination) = load(model, p), load(model, d)
    src, dst = [StagePool(stage) for stage in sources], [StagePool(stage) for stage in targets]
    with Ports(backend, source, src, destination, dst) as ports:
        ports.begin("r/0", len(prompt), SRC_PAGES, DST_PAGES[: len(SRC_PAGES)])
        first = prefill(ports, sources, "r/0", prompt, push)
        ports.sample("r/0", str(first).encode())
        ports.finish("r/0")
        ends = [*ports.heard(PREFILL, "r/0", "transfer"), *ports.heard(DECODE, "r/0", "transfer")]
        assert all(end.good for end in ends), ends
        assert_same_bytes(sources, targets, len(prompt))
        told = ports.heard(DECODE, "r/0", "transfer")[0].payload
        ports.close("r/0")
        ports.assert_baseline()
        assert sum(port.counters().bytes_done for port in ports.senders) == (len(prompt) * sum(source.bytes_per_token))
    assert decode(targets, prompt, int(told)) == model.continuations[0]


@pytest.mark.parametrize(("p", "d"), ALL)
@pytest.mark.parametrize("backend", IN_FULL)
def test_T7_kv_and_tokens_are_the_same_for_every_split_of_30_layers(
    model: Reference, backend: str, p: int, d: int
) -> None:
    check(model, backend, p, d)


@pytest.mark.parametrize(("p", "d"), FEW)
@pytest.mark.parametrize("backend", [name for name in REAL if name not in IN_FULL])
def test_T7_some_splits_on_the_other_engines(model: Reference, backend: str, p: int, d: int) -> None:
    check(model, backend, p, d)


@pytest.mark.parametrize(("p", "d"), FEW)
@pytest.mark.parametrize("backend", REAL)
def test_T7_pushed_by_the_chunk(model: Reference, backend: str, p: int, d: int) -> None:
    check(model, backend, p, d, push="chunk")


@pytest.mark.soak
@pytest.mark.parametrize(("p", "d"), [pair for pair in ALL if pair not in FEW])
@pytest.mark.parametrize("backend", [name for name in REAL if name not in IN_FULL])
def test_T7_every_split_on_the_other_engines(model: Reference, backend: str, p: int, d: int) -> None:
    check(model, backend, p, d)
