"""The default model's tokenizer, for all gateway tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.smollm2 import ensure_default_model
from gateway.detokenize import Vocabulary
from gateway.model_files import ModelFiles


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return ensure_default_model()


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
