"""What the gateway costs per streamed token, and how much it adds to the gaps between tokens.

    python -m bench.gateway_throughput --streams 200 --rate 10

In: a number of streams and a pace. A real gateway serves scripted instances, which are as fast as they are told to be;
every client streams from it at once. Out: tokens per second of the gateway's CPU time, and the added ITL: the gap
between two tokens as the client reads them less the gap with which the instance told them; and the same where the
client asks the instance itself, which is what the machine and this measurement make of it. `--rate 0` measures how fast
it can be. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from bench.bodies import Manner, body
from bench.client import Client
from bench.load import Load
from bench.records import Record
from bench.scripted_gateway import scripted_gateway
from bench.summary import Distribution, distribution
from bench.workload import Ask, Planned
from paceline_proto.v1 import generation_pb2, generation_pb2_grpc

TARGET_PER_CORE, TARGET_ADDED_MS = 2000.0, 5.0
MODEL = "SmolLM2-135M-Instruct"
FIRST_STREAM = 100  # a stream is known by the first id of its prompt


async def load(url: str, streams: int, tokens: int) -> list[Record]:
    """All streams at once, through the gateway."""
    manner = Manner("completions", MODEL, True, False, True, {})
    ask = Ask("", tokens)
    bodies = [body(ask, [FIRST_STREAM + stream, 1, 2, 3], manner) for stream in range(streams)]
    plan = [Planned(stream, 0.0, ask) for stream in range(streams)]
    clock = asyncio.get_running_loop().time
    async with Client(url, "completions", "", 600.0, clock) as client:
        return await Load(client.send, plan, bodies).closed_loop(streams)


def added_gaps(records: list[Record], stamps: dict[int, list[float]]) -> list[float]:
    """Milliseconds. Tokens 1 and later: the first one comes from the prefill side."""
    added = []
    for record in records:
        told = stamps[FIRST_STREAM + record.index]
        read = [at for at, tokens in record.chunks for _ in range(tokens)][1:]
        gaps = zip(zip(read, read[1:], strict=False), zip(told, told[1:], strict=False), strict=True)
        added += [1e3 * ((b - a) - (d - c)) for (a, b), (c, d) in gaps]
    return added


async def direct_load(address: str, streams: int, tokens: int) -> list[Record]:
    """The same streams from the instance itself: what this measurement finds where there is no gateway."""
    clock = asyncio.get_running_loop().time
    sampling = generation_pb2.SamplingParams(max_tokens=tokens)

    async def one(stub: generation_pb2_grpc.GenerationStub, index: int) -> Record:
        request = generation_pb2.GenerateRequest(prompt_ids=[FIRST_STREAM + index], sampling=sampling)
        begin, answers = clock(), stub.Generate(request)
        chunks = [(clock(), len(answer.tokens.tokens)) async for answer in answers if answer.HasField("tokens")]
        chunks.insert(0, (begin, 1))  # token 0 is the prefill side's
        return Record(index=index, scheduled=begin, sent=begin, ended=clock(), chunks=tuple(chunks),
                      output_tokens=tokens, asked_tokens=tokens)  # fmt: skip

    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        return list(await asyncio.gather(*(one(stub, index) for index in range(streams))))


@dataclass(frozen=True, slots=True)
class Found:
    per_second: float
    per_cpu_second: float  # of the gateway
    added: Distribution  # ITL in ms, through the gateway
    floor: Distribution  # without it


def measure(options: argparse.Namespace, more: list[str]) -> Found:
    streams, tokens = options.streams, options.tokens
    with scripted_gateway(options.rate, options.batch, more, options.profile) as gateway:
        asyncio.run(load(gateway.url, min(streams, 8), 20))  # imports, connections, caches
        process = psutil.Process(gateway.gateway_pid)
        before = process.cpu_times()
        records = asyncio.run(load(gateway.url, streams, tokens))
        after = process.cpu_times()
        direct = asyncio.run(direct_load(gateway.decode, streams, tokens))
    failed = [record for record in records if not record.ok]
    if failed:
        raise SystemExit(f"gateway_throughput: {len(failed)} streams failed: {failed[0].error}: {failed[0].reason}")
    used = after.user + after.system - before.user - before.system
    told = sum(record.output_tokens for record in records)
    each = tokens - 1
    stamps = [{stream: moments[-2 * each : -each] for stream, moments in gateway.stamps.items()},
              {stream: moments[-each:] for stream, moments in gateway.stamps.items()}]  # fmt: skip
    added, floor = distribution(added_gaps(records, stamps[0])), distribution(added_gaps(direct, stamps[1]))
    assert added is not None and floor is not None
    return Found(told / max(record.ended for record in records), told / used, added, floor)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway_throughput", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=200, help="default: 200")
    parser.add_argument("--rate", type=float, default=10.0, help="tokens per second of each (default: 10; 0: no pause)")
    parser.add_argument("--tokens", type=int, default=150, help="of each stream (default: 150)")
    parser.add_argument("--batch", type=int, default=32, help="streams that get their tokens together (default: 32)")
    parser.add_argument("--profile", type=Path, help="run the gateway under cProfile, write there")
    options, more = parser.parse_known_args()
    found = measure(options, more)
    pace = f"{options.streams * options.rate:g} tokens/s" if options.rate else "as fast as they can"
    print(f"{options.streams} streams at {pace}, {options.batch} at a time: {found.per_second:.0f} tokens/s")
    print(f"gateway: {found.per_cpu_second:.0f} tokens per second of CPU time (target {TARGET_PER_CORE:g})")
    for name, d in (("added ITL, ms", found.added), ("without gateway", found.floor)):
        print(f"{name}: median {d.median:.2f}, mean {d.mean:.2f}, p90 {d.p90:.2f}, p95 {d.p95:.2f}, p99 {d.p99:.2f}")
    return int(found.per_cpu_second < TARGET_PER_CORE or (options.rate > 0 and found.added.p99 > TARGET_ADDED_MS))


if __name__ == "__main__":
    sys.exit(main())
