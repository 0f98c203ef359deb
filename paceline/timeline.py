"""Asks every instance what its ranks did, and writes it down as one trace or as a table of bubbles.

In: addresses, or the record of a local cluster. Out: a file for Perfetto or chrome://tracing, a table; exit code 1
if an instance does not answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio

from paceline.asked import Asked
from paceline.health import CHANNEL_OPTIONS
from paceline.silence import why_silent
from paceline.status_table import aligned
from paceline.trace_events import RankSummary, summarize, trace
from paceline_proto.v1 import timeline_pb2, timeline_pb2_grpc
from security.channels import dial

_LARGEST = 64 << 20


async def timeline(asked: Asked, seconds: float, out: Path | None, summary: bool) -> int:
    known = [one.address for one in await asked.known()]
    answers = await asyncio.gather(*(read(asked, address, seconds) for address in known), return_exceptions=True)
    told: list[timeline_pb2.TimelineReadResponse] = []
    failed = 0
    for address, answer in zip(known, answers, strict=True):
        if isinstance(answer, grpc.aio.AioRpcError):
            print(f"paceline: {address}: {why_silent(answer, address)}", file=sys.stderr)
            failed += 1
        elif isinstance(answer, BaseException):
            raise answer
        else:
            told += answer
    if summary:
        print(table(summarize(told)))
    if out is not None:
        out.write_text(json.dumps(trace(told)))
        print(f"{out}: {len(told)} ranks; open it at https://ui.perfetto.dev or chrome://tracing", file=sys.stderr)
    return 1 if failed else 0


async def read(asked: Asked, address: str, seconds: float) -> list[timeline_pb2.TimelineReadResponse]:
    options = [*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", _LARGEST)]
    async with dial(address, asked.secrets, options) as channel:
        stub = timeline_pb2_grpc.TimelineStub(channel)
        question = timeline_pb2.TimelineReadRequest(seconds=seconds)
        return [told async for told in stub.Read(question, timeout=asked.timeout)]


def table(summaries: Sequence[RankSummary]) -> str:
    rows = [("instance", "rank", "ticks", "tokens", "in flight", "computing", "waits for hidden", "bubbles")]
    rows += [
        (
            one.instance, str(one.rank), str(one.ticks), str(one.tokens), f"{one.in_flight:.3f} s",
            f"{one.computing:.3f} s", f"{one.waiting_for_hidden:.3f} s", f"{one.bubble_fraction:.1%}",
        )
        for one in summaries
    ]  # fmt: skip
    return "\n".join(aligned(rows))
