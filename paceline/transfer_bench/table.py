"""Draws the figures for people. In: figures. Out: text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .figures import ComputeFigure, Figure, Ratios, TailFigure
from .measure import CHUNKS, PACE, WHOLE, IdleCpu
from .shape import Shape

NAMES = {
    WHOLE: "sender path, whole prompt",
    CHUNKS: "sender path, in chunks",
    "engine": "engine alone, no ports",
    "window": "raw: Mooncake, pieces of 1 MiB, 64 in flight",
    "batch": "raw: Mooncake, one blocking batch",
    "prepped": "raw: NIXL, one prepared transfer",
    "memcpy": "copy inside one process, one thread",
    "shm": "copy into the receiver's memory, and told",
    "tcp": "one TCP connection, in one piece",
}


def render(
    shape: Shape, found: Sequence[Figure], ratios: Sequence[Ratios], idle: Sequence[IdleCpu],
    compute: Sequence[ComputeFigure], tails: Sequence[TailFigure],
) -> str:  # fmt: skip
    lines: list[str] = []
    for tokens in dict.fromkeys(figure.tokens for figure in found):
        lines += [*_prompt(shape, tokens, found, ratios), ""]
    lines.append("idle engine          sender  receiver   (percent of one processor)")
    lines += [f"  {one.backend:17} {100 * one.sender:7.2f} {100 * one.receiver:9.2f}" for one in idle]
    if compute:
        lines += ["", "a matmul loop of 2 threads in the sender is slower by a factor of"]
        lines.append(f"                      idle engine  at {PACE / 1e6:.0f} MB/s  back to back  GB/s then")
        lines += [
            f"  {one.backend:17} {one.slowdown_by_idle_engine:13.2f} {one.slowdown_by_paced:12.2f} "
            f"{one.slowdown_by_transfers:13.2f} {one.bytes_per_second / 1e9:10.2f}"
            for one in compute
        ]
    if tails:
        lines += ["", f"left to move after the forward of {tails[0].tokens} positions, KV sent after"]
        lines += [
            f"  {one.backend:10} {'the end' if one.push == 'end' else 'each ' + one.push:12} {one.milliseconds:9.3f} ms"
            f" {100 * one.share:8.1f} % of a push of everything at the end"
            for one in tails
        ]
    return "\n".join(lines)


def _prompt(shape: Shape, tokens: int, found: Sequence[Figure], ratios: Sequence[Ratios]) -> Iterator[str]:
    writes = shape.writes(1, 1, tokens)
    nbytes = shape.prompt_bytes(tokens)
    page = " (one page)" if tokens == shape.page_size else ""
    size = f"{nbytes / (1 << 20):.1f} MiB in {len(writes)} writes"
    yield f"{tokens} positions{page}: {size} of {max(write[2] for write in writes) / 1024:g} KiB"
    yield f"  {'':58} {'ms':>9} {'GB/s':>6} {'CPU s/GB':>8}  {'of raw':>6} {'of TCP':>6} {'of shm':>6} {'of memcpy':>9}"
    known = {(one.backend, one.method): one for one in ratios if one.tokens == tokens}
    for figure in found:
        if figure.tokens != tokens:
            continue
        text = (
            f"  {figure.backend:10} {NAMES[figure.method]:47} {figure.milliseconds:9.3f} "
            f"{figure.bytes_per_second / 1e9:6.2f} {figure.cpu_seconds_per_gigabyte:8.2f}"
        )
        if (one := known.get((figure.backend, figure.method))) is not None:
            text += f"  {one.to_raw:6.2f} {one.to_tcp:6.2f} {one.to_shm:6.2f} {one.to_memcpy:9.2f}"
        yield text
