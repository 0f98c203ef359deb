"""The reference model: a token depends on the request, its position and the seed, and on nothing else."""

from __future__ import annotations

from zlib import crc32

EOS = 7  # one token in sixteen ends a request


def token_at(seed: int, request: str, position: int) -> int:
    value = crc32(f"{seed}:{request}:{position}".encode())
    return EOS if value % 16 == 0 else 16 + value % 50_000


def prompt_of(seed: int, request: str, length: int) -> tuple[int, ...]:
    return tuple(16 + crc32(f"p{seed}:{request}:{position}".encode()) % 50_000 for position in range(length))


def reference(seed: int, request: str, prompt: int, output: int, ignore_eos: bool) -> list[int]:
    """All output tokens of a request that nothing cut short."""
    tokens: list[int] = []
    while len(tokens) < output and (ignore_eos or EOS not in tokens[-1:]):
        tokens.append(token_at(seed, request, prompt + len(tokens)))
    return tokens
