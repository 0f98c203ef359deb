"""Reading a model folder: its spec, its digest, and single tensors of its safetensors files.

In: a Hugging Face folder with `config.json` and either `model.safetensors` or
`model.safetensors.index.json` and its shards. Out: `ModelSpec`, a digest, tensors by name.

Invariants: only the tensors that are asked for are read, and only the shards that hold them are
opened; a missing or misshapen tensor is an error that names it. Importing this module does not
import torch (`WeightFiles.read` does), so daemons and the command line can use it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.layer_split import parse_split, split_layers
from engine.model_spec import ModelSpec, Moe, parse_spec, read_spec
from engine.rope_spec import Rope, UnsupportedModel

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointError",
    "ModelSpec",
    "Moe",
    "Rope",
    "UnsupportedModel",
    "WeightFiles",
    "model_digest",
    "parse_spec",
    "parse_split",
    "read_spec",
    "split_layers",
]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
_TOKENIZER = (  # whichever of them there are
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_PROBE = 256  # bytes of each tensor that enter the digest


class CheckpointError(ValueError):
    """The weights in the folder are not those that the config promises; the message names what is wrong."""


class WeightFiles:
    """The safetensors files of one folder, opened as they are needed."""

    def __init__(self, folder: Path | str) -> None:
        """Raises `CheckpointError` if the folder has no safetensors weights."""
        self.folder = Path(folder)
        self._file_of = _tensor_files(self.folder)
        self._open: dict[str, Any] = {}

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """One tensor, copied out of the file: aligned as torch allocates, and independent of the file.

        Raises `CheckpointError` if the tensor is missing or its shape is not `shape`.
        """
        from safetensors import safe_open

        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name} is missing in {self.folder}")
        if file not in self._open:
            if not (self.folder / file).exists():
                raise CheckpointError(f"{self.folder / file} is missing; it should hold tensor {name}")
            self._open[file] = safe_open(self.folder / file, framework="pt")
        if name not in self._open[file].keys():  # noqa: SIM118 (not a dict)
            raise CheckpointError(f"tensor {name} is missing in {self.folder / file}, though the index puts it there")
        found = tuple(self._open[file].get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(f"tensor {name} has shape {list(found)}, but config.json asks for {list(shape)}")
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        # A mapped tensor starts anywhere in the file; matrix kernels may round by alignment, so copy.
        return tensor.to(dtype=dtype, copy=True)


def model_digest(folder: Path | str) -> str:
    """A sha256 (hex) by which two instances know that they serve the same model, without a full read.

    It covers `config.json`, the tokenizer's files, the name, size and header of each safetensors file, and a few
    bytes of every tensor, so two revisions or fine-tunes of one architecture differ.
    Raises `CheckpointError` for a missing or malformed file.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    _absorb(digest, (folder / "config.json").read_bytes())
    for name in _TOKENIZER:
        if (folder / name).exists():
            _absorb(digest, name.encode())
            _absorb(digest, (folder / name).read_bytes())
    for name in sorted(set(_tensor_files(folder).values())):
        path = folder / name
        header, data_start = _read_header(path)
        _absorb(digest, name.encode())
        _absorb(digest, header)
        _absorb(digest, str(path.stat().st_size).encode())
        with path.open("rb") as file:
            for tensor, entry in sorted(json.loads(header).items()):
                if tensor == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                # From the middle: some formats leave the first rows of tensors (padding tokens) untouched.
                file.seek(data_start + begin + max(0, (end - begin - _PROBE) // 2))
                _absorb(digest, file.read(min(_PROBE, end - begin)))
    return digest.hexdigest()


def _absorb(digest: hashlib._Hash, part: bytes) -> None:
    """Add one part with its length, so that no two lists of parts give the same bytes."""
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)


def _tensor_files(folder: Path) -> dict[str, str]:
    """File name by tensor name. The index, where there is one, is taken at its word."""
    if (folder / _INDEX).exists():
        weight_map: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        return weight_map
    if (folder / _SINGLE).exists():
        header, _ = _read_header(folder / _SINGLE)
        return dict.fromkeys((name for name in json.loads(header) if name != "__metadata__"), _SINGLE)
    raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _read_header(path: Path) -> tuple[bytes, int]:
    """The JSON header of a safetensors file, and the offset at which its data starts."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            header = file.read(length) if len(prefix) == 8 and length <= _LARGEST_HEADER else b""
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if not header or len(header) != length:
        raise CheckpointError(f"{path} is not a complete safetensors file")
    return header, 8 + length
