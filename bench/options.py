"""The options of `paceline bench`. Nothing heavy is imported here, so that `paceline --help` stays fast."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bench.arrivals import Ramp
from bench.workload import Lengths

_T = TypeVar("_T")


def _checked(read: Callable[[str], _T], what: str) -> Callable[[str], _T]:
    def convert(text: str) -> _T:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}") from None

    return convert


def _natural(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError
    return value


def _lengths(text: str) -> Lengths:
    low, _, high = text.partition(":")
    lengths = Lengths(_natural(low), _natural(high or low))
    if lengths.high < lengths.low:
        raise ValueError
    return lengths


def _ramp(text: str) -> Ramp:
    first, last, seconds = text.split(":")
    ramp = Ramp(float(first), _positive(last), _positive(seconds))
    if ramp.first < 0:
        raise ValueError
    return ramp


def _limits(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    return {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e"}[name], _positive(value)


def _ids(text: str) -> tuple[int, int]:
    low, high = (int(part) for part in text.split(":"))
    if not 0 <= low < high:
        raise ValueError
    return low, high


def _loads(text: str) -> tuple[int, ...]:
    return tuple(_natural(part) for part in text.split(","))


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


COUNT = _checked(_natural, "number of at least 1")
POSITIVE = _checked(_positive, "positive number")
LENGTHS = _checked(_lengths, "length N or range LOW:HIGH of at least 1")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """What is asked, and how."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset", choices=("random", "prefix", "file", "trace"), default="random",
        help="random: prompts of exact length; prefix: groups that share a beginning; file: --prompts; trace: --trace",
    )  # fmt: skip
    group.add_argument(
        "--input",
        type=LENGTHS,
        default=Lengths(512, 512),
        metavar="N|A:B",
        help="prompt tokens of their own (default: 512)",
    )
    group.add_argument(
        "--output", type=LENGTHS, default=Lengths(128, 128), metavar="N|A:B", help="output tokens (default: 128)"
    )
    group.add_argument(
        "--prefix", type=COUNT, default=512, metavar="N", help="tokens that a group shares (default: 512)"
    )
    group.add_argument("--groups", type=COUNT, default=8, metavar="N", help="of prompts that share (default: 8)")
    group.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines with prompt, text or messages, and max_tokens"
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake JSON lines or Azure CSV; brings its own times"
    )
    group.add_argument("--input-scale", type=POSITIVE, default=1.0, metavar="X", help="of a trace's prompt lengths")
    group.add_argument("--output-scale", type=POSITIVE, default=1.0, metavar="X", help="of a trace's output lengths")
    group.add_argument(
        "--time-scale", type=POSITIVE, default=1.0, metavar="X", help="of a trace's times; 0.5 is twice as fast"
    )
    group.add_argument("--max-input", type=COUNT, metavar="N", help="leave out a trace's longer prompts")
    group.add_argument("--max-output", type=COUNT, metavar="N", help="cut a trace's longer answers")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same requests at the same times")
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    group.add_argument(
        "--prompt-as", choices=("ids", "text"),
        help="token ids, or text that is encoded to exactly as many (default: ids for completions, text for chat)",
    )  # fmt: skip
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR",
        help="folder with tokenizer.json, for text without asking the server's /tokenize",
    )  # fmt: skip
    group.add_argument(
        "--token-ids",
        type=_checked(_ids, "range LOW:HIGH"),
        default=(1000, 30000),
        metavar="LOW:HIGH",
        help="ids to draw from, without --tokenizer (default: 1000:30000)",
    )
    group.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let answers end early")
    group.add_argument("--plain", action="store_true", help="send no field that is not OpenAI's own")
    group.add_argument(
        "--extra-body",
        type=_checked(_object, "JSON object"),
        default={},
        metavar="JSON",
        help="further fields of each request",
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """When requests come, how many, and what is counted."""
    group = parser.add_argument_group("load")
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--concurrency", type=COUNT, metavar="N", help="closed loop: so many at a time (default: 8)")
    shape.add_argument("--rate", type=POSITIVE, metavar="R", help="open loop: requests per second")
    shape.add_argument(
        "--ramp",
        type=_checked(_ramp, "A:B:SECONDS"),
        metavar="A:B:S",
        help="open loop: from A to B per second within S seconds",
    )
    group.add_argument(
        "--arrival", choices=("poisson", "constant"), default="poisson", help="of --rate (default: poisson)"
    )
    group.add_argument(
        "--burstiness",
        type=POSITIVE,
        default=1.0,
        metavar="X",
        help="gamma shape of the gaps: 1 is Poisson, less is burstier",
    )
    group.add_argument("--max-in-flight", type=COUNT, metavar="N", help="open loop: hold back more; the wait counts")
    group.add_argument(
        "--requests", type=COUNT, metavar="N", help="end after so many (default: 100, or the whole trace or --duration)"
    )
    group.add_argument("--duration", type=POSITIVE, metavar="S", help="begin no request later than this")
    group.add_argument(
        "--warmup",
        type=_checked(_count, "count"),
        default=2,
        metavar="N",
        help="requests before the run, not counted (default: 2)",
    )
    group.add_argument(
        "--window", choices=("all", "steady"), default="all", help="steady: without filling and draining"
    )
    group.add_argument(
        "--request-timeout", type=POSITIVE, default=600.0, metavar="S", help="of one request (default: 600)"
    )
    group.add_argument(
        "--slo", type=_checked(_limits, "limit like ttft:500"), nargs="+", default=[], metavar="NAME:MS",
        help="goodput counts requests within all of these: ttft, tpot, e2e",
    )  # fmt: skip


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    _add_access(parser)
    add_shape(parser)
    add_workload(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the summary here")
    output.add_argument("--records", type=Path, metavar="FILE", help="write a JSON line for each request here")
    output.add_argument(
        "--report", type=Path, metavar="FILE", help="write an HTML page with plots here (needs matplotlib)"
    )
    output.add_argument("--no-progress", dest="progress", action="store_false", help="no live line")


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets", nargs="+", metavar="NAME=TARGET",
        help="a URL, or `up` and options of `paceline up`, quoted; the others are compared with the first",
    )  # fmt: skip
    _add_access(parser)
    parser.add_argument("--rounds", type=COUNT, default=7, metavar="N", help="of all targets (default: 7)")
    add_shape(parser)
    add_workload(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round here")


def _add_access(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument(
        "--api-key", default="", metavar="KEY", help="default: $PACELINE_API_KEY, else $OPENAI_API_KEY (safer)"
    )  # fmt: skip


def add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir", type=Path, metavar="PATH",
        help="of a cluster on this machine: CPU time of its processes, bubbles and control of its ranks",
    )  # fmt: skip
    parser.add_argument(
        "--secrets", default=os.environ.get("PACELINE_SECRETS", ""), metavar="DIR",
        help="that cluster's, if it has any (default: $PACELINE_SECRETS, or none)",
    )  # fmt: skip
    parser.add_argument(
        "--stacks", action="store_true", help="the load once more, under py-spy: how much encodes and decodes"
    )
    parser.add_argument(
        "--allocations", action="store_true",
        help="the load once more, under memray: how much is allocated (needs gdb, and a long --ring-timeout)",
    )  # fmt: skip
    parser.add_argument(
        "--loads", type=_checked(_loads, "list of concurrencies like 1,2,4,8"), default=(), metavar="N,N,…",
        help="closed loops of so many at a time, one after another: every figure against the load",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="of --loads, as SVG (needs matplotlib)")
    add_serve(parser)
