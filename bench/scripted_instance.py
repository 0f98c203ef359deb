"""An instance without a model, as a process of its own: what the gateway costs is measured against it.

`python -m bench.scripted_instance prefill|decode [--rate TOKENS] [--batch N] [--stamps FILE]` prints its address. In:
Generate calls. Out: prefill waits, tells the first token and hands over; decode tells one token after the other, `rate`
per second and stream, the streams of a batch at the same moments as a microbatch does; 0 is as fast as it can. At
SIGTERM it writes the moment of every token: JSON, the first prompt id → moments on this machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc

Kind = generation_pb2.Outcome.Kind
_GOLDEN = 0.6180339887
FIRST_WORD, WORDS = 1000, 20000  # token ids that are plain text in the default model


class ScriptedInstance(generation_pb2_grpc.GenerationServicer, bootstrap_pb2_grpc.BootstrapServicer):
    def __init__(self, prefill: bool, model: str, rate: float, batch: int, first_after: float) -> None:
        self._prefill, self._model, self._rate, self._batch = prefill, model, rate, batch
        self._first_after = first_after
        self.address = ""
        self.stamps: dict[int, list[float]] = {}

    async def Describe(self, request: Any, context: Any) -> bootstrap_pb2.DescribeResponse:
        role = common_pb2.ROLE_PREFILL if self._prefill else common_pb2.ROLE_DECODE
        name = "prefill-0" if self._prefill else "decode-0"
        return bootstrap_pb2.DescribeResponse(
            instance=common_pb2.InstanceRef(instance_id=name, address=self.address, epoch=1),
            role=role, serving=True, protocol_version=1, model_name=self._model, model_digest="scripted", num_layers=30,
            kv_heads=3, head_dim=64, page_size=16, kv_dtype="float32", max_model_len=8192, pages=1 << 20,
            vocab_size=49152, transfer_backend="scripted",
        )  # fmt: skip

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        if self._prefill:
            await asyncio.sleep(self._first_after)
            yield _token(0, request.prompt_ids[0])
            yield _outcome(Kind.KIND_HANDED_OVER, 1)
            return
        stream, count = request.prompt_ids[0], request.sampling.max_tokens
        moments = self.stamps.setdefault(stream, [])
        for position in range(1, count):
            if self._rate:
                await asyncio.sleep(max(0.0, self._next_tick(stream) - time.monotonic()))
            moments.append(time.monotonic())
            yield _token(position, stream)
        yield _outcome(Kind.KIND_LENGTH, count)

    async def Abort(self, request: Any, context: Any) -> generation_pb2.AbortResponse:
        return generation_pb2.AbortResponse()

    def _next_tick(self, stream: int) -> float:
        """A batch's ticks are a period apart; the batches are spread evenly over it, however many there are."""
        phase = stream // self._batch * _GOLDEN % 1.0
        return (math.floor(time.monotonic() * self._rate - phase) + 1 + phase) / self._rate


def _token(position: int, stream: int) -> generation_pb2.GenerateResponse:
    word = FIRST_WORD + (stream * 31 + position * 7) % WORDS
    chunk = generation_pb2.TokenChunk(position=position, tokens=[generation_pb2.Token(id=word)])
    return generation_pb2.GenerateResponse(tokens=chunk)


def _outcome(kind: Kind.ValueType, count: int) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(outcome=generation_pb2.Outcome(kind=kind, output_tokens=count))


async def serve(options: argparse.Namespace) -> None:
    instance = ScriptedInstance(
        options.role == "prefill", options.model_name, options.rate, options.batch, options.first_after
    )
    server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])
    generation_pb2_grpc.add_GenerationServicer_to_server(instance, server)
    bootstrap_pb2_grpc.add_BootstrapServicer_to_server(instance, server)
    instance.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print(instance.address, flush=True)
    await ended.wait()
    await server.stop(grace=None)
    if options.stamps is not None:
        options.stamps.write_text(json.dumps(instance.stamps))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scripted_instance", description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--model-name", default="SmolLM2-135M-Instruct")
    parser.add_argument("--rate", type=float, default=0.0, help="tokens per second of each stream; 0: no pause")
    parser.add_argument("--batch", type=int, default=32, help="streams that tick together (default: 32)")
    parser.add_argument("--first-after", type=float, default=0.0, metavar="S", help="time of a prefill (default: 0)")
    parser.add_argument("--stamps", type=Path, help="write the moments of all tokens here")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
