"""A model folder's weights: only what a rank needs is read, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import CheckpointError, model_digest
from engine.stage import Stage
from tests.engine.driver import generate, load_split
from tests.engine.tiny_models import Reference, save_tiny


@pytest.fixture
def copy(tiny: Callable[[str], Reference], tmp_path: Path) -> Path:
    """A private copy of the tiny Llama folder."""
    return Path(shutil.copytree(tiny("llama").folder, tmp_path / "copy"))


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_rank_needs_only_the_files_of_its_own_tensors(tiny: Callable[[str], Reference], tmp_path: Path) -> None:
    # Given the same weights in many shards, and for each rank a copy with only the shards it should need
    reference = tiny("llama-tied-llama3")
    save_tiny("llama-tied-llama3", tmp_path / "all", max_shard_size="20KB")
    weight_map = json.loads((tmp_path / "all" / "model.safetensors.index.json").read_text())["weight_map"]
    stages = []
    for own, layers in (
        (("model.embed_tokens.", "model.layers.0."), range(1)),
        (("model.layers.1.", "model.layers.2."), range(1, 3)),
        (("model.layers.3.", "model.norm.", "model.embed_tokens."), range(3, 4)),
    ):
        folder = Path(shutil.copytree(tmp_path / "all", tmp_path / f"rank-{layers.start}"))
        needed = {file for name, file in weight_map.items() if name.startswith(own)}
        foreign = set(weight_map.values()) - needed
        assert foreign
        for file in foreign:
            (folder / file).unlink()
        # when each rank loads its layers, then it succeeds
        stages.append(Stage.load(folder, layers, 64, 16))
    assert generate(stages, reference.prompts, 12, 16) == reference.continuations
    with pytest.raises(CheckpointError, match=r"should hold tensor model\.layers\.2\."):
        load_split(tmp_path / "rank-0", [(2, 3)], 4, 16)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    _rewrite(copy, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        Stage.load(copy, range(4), 4, 16)
    Stage.load(copy, range(2), 4, 16)  # a rank that does not need it is not disturbed


def test_a_misshapen_tensor_is_named(copy: Path) -> None:
    _rewrite(copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[63\], but config.json asks for \[64\]"):
        Stage.load(copy, range(4), 4, 16)


def test_a_folder_without_weights_or_with_a_cut_file_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        Stage.load(copy, range(4), 4, 16)
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        Stage.load(copy, range(4), 4, 16)


def test_layers_and_dtype_must_exist(copy: Path) -> None:
    with pytest.raises(ValueError, match="not a range of this model's 4"):
        Stage.load(copy, range(2, 5), 4, 16)
    with pytest.raises(ValueError, match="dtype 'int8' is not one of"):
        Stage.load(copy, range(4), 4, 16, dtype="int8")


def test_progress_rises_to_one(copy: Path) -> None:
    seen: list[tuple[float, str]] = []
    Stage.load(copy, range(4), 4, 16, on_progress=lambda fraction, what: seen.append((fraction, what)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert seen[0] == (0.0, "embedding")
    assert seen[-1][0] == 1.0
    assert [what for _, what in seen if what.startswith("layer")] == ["layer 0", "layer 1", "layer 2", "layer 3"]


def test_the_digest_tells_models_apart_and_copies_not(tiny: Callable[[str], Reference], copy: Path) -> None:
    original = model_digest(tiny("llama").folder)
    assert model_digest(copy) == original
    _rewrite(copy, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].mul_(1.5))
    assert model_digest(copy) != original, "other weights in the same shapes are another model"
    changed = json.loads((tiny("llama").folder / "config.json").read_text()) | {"rms_norm_eps": 1e-4}
    shutil.copy(tiny("llama").folder / "model.safetensors", copy)
    assert model_digest(copy) == original
    (copy / "config.json").write_text(json.dumps(changed))
    assert model_digest(copy) != original
    shutil.copy(tiny("llama").folder / "config.json", copy)
    (copy / "tokenizer.json").write_text("{}")
    assert model_digest(copy) != original, "ids of another tokenizer mean other text"


def test_specs_splits_and_digests_do_not_import_torch(copy: Path) -> None:
    program = (
        "import sys; from engine.checkpoint import *; from engine.smollm2 import DEFAULT_MODEL_NAME; "
        "folder = sys.argv[1]; split_layers(read_spec(folder), 2); model_digest(folder); "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(copy)], check=True, cwd=Path(__file__).parents[2])
