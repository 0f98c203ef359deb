"""The default model's tokenizer, for all gateway tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gateway.app
from engine.smollm2 import ensure_default_model
from gateway.detokenize import Vocabulary
from gateway.model_files import ModelFiles


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="session", autouse=True)
def _read_once() -> Iterator[None]:
    """Gateways of one process share the tokenizer that they would each read: a third of a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway.app, "ModelFiles", cache(ModelFiles))
        yield


@pytest.fixture(scope="session")
def files(model_folder: Path) -> ModelFiles:
    return ModelFiles(model_folder)


@pytest.fixture(scope="session")
def vocabulary(files: ModelFiles) -> Vocabulary:
    return files.vocabulary


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Any:
    """The same tokenizer as transformers has it."""
    from transformers import AutoTokenizer  # seconds to import

    return AutoTokenizer.from_pretrained(model_folder)
