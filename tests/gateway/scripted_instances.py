"""Scripted instances: real gRPC servers without a model behind them.

A `ScriptedInstance` answers Describe like an instance and runs a script for each Generate; it
records what it was asked, which calls were cancelled and which attempts aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc

Kind = generation_pb2.Outcome.Kind
Script = Callable[[generation_pb2.GenerateRequest, Any], AsyncIterator[generation_pb2.GenerateResponse]]


def tokens(position: int, *ids: int | generation_pb2.Token) -> generation_pb2.GenerateResponse:
    told = [token if isinstance(token, generation_pb2.Token) else generation_pb2.Token(id=token) for token in ids]
    return generation_pb2.GenerateResponse(tokens=generation_pb2.TokenChunk(position=position, tokens=told))


def outcome(kind: Kind.ValueType, reason: str = "", count: int = 0) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        outcome=generation_pb2.Outcome(kind=kind, reason=reason, output_tokens=count)
    )


def prefill_saying(first: int | generation_pb2.Token) -> Script:
    """Tells token 0 and hands over."""

    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield tokens(0, first)
        yield outcome(Kind.KIND_HANDED_OVER)

    return script


def decode_saying(
    ids: Sequence[int | generation_pb2.Token],
    kind: Kind.ValueType = Kind.KIND_STOP,
    first: bool = False,
    pause_s: float = 0.0,
) -> Script:
    """Tells tokens 1.. of `ids` (token 0 too if `first`) and ends with `kind`."""

    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for at in range(0 if first else 1, len(ids)):
            yield tokens(at, ids[at])
            await asyncio.sleep(pause_s)
        yield outcome(kind, count=len(ids))

    return script


async def hang(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """Takes the request and never says anything."""
    await asyncio.Event().wait()
    yield outcome(Kind.KIND_ERROR)


def tells_then_hangs(*responses: generation_pb2.GenerateResponse) -> Script:
    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for response in responses:
            yield response
        await asyncio.Event().wait()

    return script


def tells(*responses: generation_pb2.GenerateResponse) -> Script:
    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for response in responses:
            yield response

    return script


def refuses(code: grpc.StatusCode, details: str, *before: generation_pb2.GenerateResponse) -> Script:
    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for response in before:
            yield response
        await context.abort(code, details)

    return script


@dataclass
class ScriptedInstance:
    role: common_pb2.Role.ValueType
    name: str
    script: Script
    facts: dict[str, Any] = field(default_factory=dict)  # replaces fields of the description
    address: str = ""
    asked: list[generation_pb2.GenerateRequest] = field(default_factory=list)
    aborts: list[generation_pb2.AbortRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: int = 0

    def description(self) -> bootstrap_pb2.DescribeResponse:
        facts: dict[str, Any] = {
            "instance": common_pb2.InstanceRef(instance_id=self.name, address=self.address, epoch=7),
            "role": self.role,
            "serving": True,
            "protocol_version": 1,
            "model_name": "m",
            "model_digest": "d",
            "num_layers": 30,
            "page_size": 16,
            "kv_dtype": "float32",
            "max_model_len": 512,
            "vocab_size": 49152,
            "transfer_backend": "scripted",
        }
        return bootstrap_pb2.DescribeResponse(**(facts | self.facts))

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[ScriptedInstance]:
        server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])
        generation_pb2_grpc.add_GenerationServicer_to_server(_Generation(self), server)
        bootstrap_pb2_grpc.add_BootstrapServicer_to_server(_Bootstrap(self), server)
        self.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(grace=None)


class _Generation(generation_pb2_grpc.GenerationServicer):
    def __init__(self, instance: ScriptedInstance) -> None:
        self._instance = instance

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        instance = self._instance
        instance.asked.append(request)
        instance.running += 1
        try:
            async for response in instance.script(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            instance.cancelled.append(request.request_id)
            raise
        finally:
            instance.running -= 1

    async def Abort(self, request: generation_pb2.AbortRequest, context: Any) -> generation_pb2.AbortResponse:
        self._instance.aborts.append(request)
        return generation_pb2.AbortResponse()


class _Bootstrap(bootstrap_pb2_grpc.BootstrapServicer):
    def __init__(self, instance: ScriptedInstance) -> None:
        self._instance = instance

    async def Describe(self, request: Any, context: Any) -> bootstrap_pb2.DescribeResponse:
        return self._instance.description()


def scripted_prefill(script: Script, name: str = "p0", **facts: Any) -> ScriptedInstance:
    return ScriptedInstance(common_pb2.ROLE_PREFILL, name, script, facts)


def scripted_decode(script: Script, name: str = "d0", **facts: Any) -> ScriptedInstance:
    return ScriptedInstance(common_pb2.ROLE_DECODE, name, script, facts)
