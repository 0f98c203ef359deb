"""The command's options. Nothing heavy is imported here, so that `paceline --help` stays fast."""

from __future__ import annotations

import argparse
from pathlib import Path

STREAM_TCP = "stream-tcp"  # the stream backend as it is between hosts: its shared memory is not offered
BACKENDS = ("mooncake", "nixl", "stream", STREAM_TCP)
MOST_BYTES = 8 << 30  # of one pool; there are two, and a private buffer of the same size


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"unknown transfer backend {name!r}; there are {', '.join(BACKENDS)}")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(_count(part) for part in text.split(",")))


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 10000.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.01 and 10000 ms")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("shape of the KV")
    for name, default, what in (
        ("layers", 32, "layers"),
        ("heads", 8, "KV heads"),
        ("dim", 128, "head dimension"),
        ("dtype-bytes", 2, "bytes per element"),
        ("page-size", 16, "positions per page"),
    ):
        shape.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{what} (default: {default})")
    shape.add_argument(
        "--tokens", type=_counts, default=[256, 4096], metavar="N,N,…", help="prompt lengths (default: 256,4096)"
    )
    layout = shape.add_mutually_exclusive_group()
    layout.add_argument("--contiguous", action="store_true", help="pages in a row on both sides (default)")
    layout.add_argument("--fragmented", action="store_true", help="pages that never merge")
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--backends", type=_names, default=list(BACKENDS), metavar="NAME,…", help=f"default: {','.join(BACKENDS)}"
    )
    group.add_argument("--chunk", type=_count, default=512, metavar="N", help="positions per chunk (default: 512)")
    group.add_argument("--rounds", type=_count, default=7, metavar="N", help="default: 7")
    group.add_argument("--host", default="127.0.0.1", help="address of the sending process (default: %(default)s)")
    group.add_argument("--peer-host", default="", metavar="HOST", help="of the receiving one (default: the same)")
    group.add_argument(
        "--peer-netns", default="", metavar="NAME",
        help="network namespace to put the receiving process into, as if on another host (needs root)",
    )  # fmt: skip
    group.add_argument(
        "--checksum", choices=("xxh3", "none"), default="none", help="of the sender path (default: none)"
    )
    group.add_argument("--compute", action="store_true", help="also: what transfers cost a 2-thread matmul loop")
    group.add_argument(
        "--overlap", type=_milliseconds, metavar="MS",
        help="also: what remains to be moved when a forward of MS milliseconds per layer and chunk has ended",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the environment here")
    output.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG here")
