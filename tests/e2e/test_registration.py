"""A cluster whose parts are started one by one, as on several machines, and find each other by registration."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.config import free_ports

ROOT = Path(__file__).parents[2]
START_S = 120.0  # four instances may load on a busy machine


@contextmanager
def part(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "paceline.cli", *command], stderr=out, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) == 0, log.read_text()[-2000:]
        finally:
            process.kill()


def eventually(what: str, probe: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + START_S
    while not (value := probe()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.1)
    return value


def health(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        return dict(json.load(error))
    except OSError:
        return {"instances": []}


def another_revision(model: Path, folder: Path) -> Path:
    """The same configuration, other weights: what a fine-tuning leaves."""
    shutil.copytree(model, folder)
    tuned = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(8)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))
    tuned.save_pretrained(folder)
    return folder


def reference(model: Path, prompt: list[int], tokens: int) -> list[int]:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = loaded.generate(torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return list(ids[0, len(prompt) :].tolist())


@pytest.mark.e2e
def test_G7_two_revisions_of_a_model_in_one_pool_are_never_paired(tiny: Path, tmp_path: Path) -> None:
    models = {"old": tiny, "new": another_revision(tiny, tmp_path / "new")}
    prompt = list(range(40, 90))
    wanted = {revision: reference(model, prompt, 8) for revision, model in models.items()}
    assert wanted["old"] != wanted["new"], "or a mixed pair could not be told"
    port, registry = free_ports("127.0.0.1", 2)
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as parts:
        command = f"gateway --port {port} --registry 127.0.0.1:{registry} --model {tiny} --model-name m"
        parts.enter_context(part(tmp_path / "gateway.log", *command.split()))
        for revision, model in models.items():
            for role in ("prefill", "decode"):
                command = f"{role} --instance {role}-{revision} --gateway 127.0.0.1:{registry} --model {model}"
                command += f" --run-dir {tmp_path}/run --kv-memory 64M --transfer-backend stream"
                parts.enter_context(part(tmp_path / f"{role}-{revision}.log", *command.split()))
        eventually("all four", lambda: [one["serving"] for one in health(url)["instances"]] == [True] * 4)
        pairs = set()
        for _ in range(8):
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=60) as answer:
                pair = answer.headers["X-Paceline-Prefill"], answer.headers["X-Paceline-Decode"]
                told = json.load(answer)["choices"][0]["token_ids"]
            revision = pair[0].removeprefix("prefill-")
            assert pair[1] == f"decode-{revision}"
            assert told == wanted[revision]
            pairs.add(pair)
        assert len(pairs) == 2, "both revisions serve"
        said = [line for line in (tmp_path / "gateway.log").read_text().splitlines() if "are never paired" in line]
        assert len(said) == 2, "each mixed pair once"
        assert all("model digest" in line for line in said)
    log = (tmp_path / "prefill-old.log").read_text()
    assert f"gateway 127.0.0.1:{registry} knows this instance" in log
