"""The file of API keys: one per line, `KEY [NAME]`; # begins a comment.

In: a path. Out: its keys, or `KeysError` that names the line and never the key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

_SHORTEST_KEY = 16
_LARGEST_FILE = 4 << 20
_MOST_KEYS = 10_000


class KeysError(ValueError):
    """The file cannot be used; the message names the line, never the key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    secret: str = field(repr=False)


def read_keys(path: Path) -> list[ApiKey]:
    """Raises `KeysError`."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise KeysError(f"{path} is larger than {_LARGEST_FILE} bytes")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"the API keys in {path} cannot be read: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        if len(words[0]) < _SHORTEST_KEY or not words[0].isascii() or not words[0].isprintable():
            raise KeysError(f"{path} line {number}: a key has at least {_SHORTEST_KEY} printable ASCII characters")
        keys.append(ApiKey(words[1].strip() if len(words) > 1 else f"line {number}", words[0]))
    if not keys:
        raise KeysError(f"{path} holds no key; write one per line, e.g. the output of `openssl rand -hex 32`")
    if len(keys) > _MOST_KEYS:
        raise KeysError(f"{path} holds {len(keys)} keys; at most {_MOST_KEYS} are taken")
    return keys
