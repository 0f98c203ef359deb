"""One thread, quiet transformers, and the tiny models, each made once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import transformers

from tests.engine.tiny_models import NEW_TOKENS, VOCAB, Reference, greedy, save_tiny


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Callable[[str], Reference]:
    """Makes the `Reference` of a tiny model by name, once."""
    made: dict[str, Reference] = {}

    def reference(name: str) -> Reference:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = save_tiny(name, folder)
            random_ids = random.Random(11)
            prompts = [[random_ids.randrange(VOCAB) for _ in range(length)] for length in (37, 5, 20, 1)]
            made[name] = Reference(folder, prompts, [greedy(model, prompt, NEW_TOKENS) for prompt in prompts])
        return made[name]

    return reference
