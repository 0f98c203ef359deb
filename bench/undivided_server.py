"""The engine without disaggregation as a process: one `UndividedEngine` behind the wire contract of a pair.

    python -m bench.undivided_server --threads 1     # prints two addresses: "prefill" and "decode"

In: Generate calls of a gateway, one on each address for the same attempt. Out: as a pair tells it: the first token and
a hand-over, which costs nothing here, on the one; all others and the outcome on the other. So the same gateway serves
this process and a real pair, and what differs between the two is disaggregation alone. The call on "prefill" starts
the request; the end of either call before its time ends it.

The engine computes in a thread of its own and never waits for this one; each way between the two is a queue.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from bench.undivided_engine import Params, Request, Token, UndividedEngine
from engine.facts import Facts, read_facts
from engine.kv_pool import pages_that_fit
from engine.sampler import sample
from engine.stage import Stage
from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc

Kind = generation_pb2.Outcome.Kind
Key = tuple[str, int]
_FINISHES = {"stop": Kind.KIND_STOP, "length": Kind.KIND_LENGTH}
_MOST_REQUESTS = 256
PAGE_SIZE = 16


class EngineThread:
    """`deliver` is called in the event loop with the tokens of each step, or with why there will be no more."""

    def __init__(self, engine: UndividedEngine, deliver: Callable[[list[Token] | Exception], None]) -> None:
        self.engine = engine
        self._deliver, self._loop = deliver, asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Request | Key | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        self._inbox.put(request)

    def cancel(self, key: Key) -> None:
        self._inbox.put(key)

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            while self._take_in():
                if tokens := self.engine.step():
                    self._loop.call_soon_threadsafe(self._deliver, tokens)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._deliver, error)

    def _take_in(self) -> bool:
        """Waits only if there is nothing to compute. False: the end."""
        while not self.engine.busy or not self._inbox.empty():
            match self._inbox.get():
                case None:
                    return False
                case Request() as request:
                    self.engine.add(request)
                case key:
                    self.engine.cancel(key)
        return True


@dataclass(slots=True)
class Attempt:
    """Each side's call reads its own queue; bounded by the tokens that the request asked for."""

    started: bool = False
    first: asyncio.Queue[Token] = field(default_factory=asyncio.Queue)
    all: asyncio.Queue[Token] = field(default_factory=asyncio.Queue)


class Undivided:
    """What both sides share."""

    def __init__(self, engine: UndividedEngine, facts: Facts, model_name: str, pages: int) -> None:
        self.facts, self.model_name, self.pages = facts, model_name, pages
        self.attempts: dict[Key, Attempt] = {}
        self.ended = asyncio.Event()
        self.failure: Exception | None = None
        self.thread = EngineThread(engine, self._deliver)

    @property
    def free_pages(self) -> int:
        return self.thread.engine.free_pages

    def request_of(self, wire: generation_pb2.GenerateRequest) -> Request:
        """Raises `ValueError` for what this process cannot do; the gateway has checked all else."""
        sampling, prompt = wire.sampling, tuple(wire.prompt_ids)
        if wire.resumed or sampling.HasField("logprobs"):
            raise ValueError("a server for measurements: it neither resumes requests nor tells log-probabilities")
        pages = -(-(len(prompt) + sampling.max_tokens - 1) // PAGE_SIZE)
        if not prompt or not sampling.max_tokens or pages > self.pages:
            raise ValueError(f"the request needs {pages} pages for at least one token each way; there are {self.pages}")
        params = Params(
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed,
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
            tuple(sampling.logit_bias.items()),
        )  # fmt: skip
        stop_ids = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.facts.eos_ids))
        key = (wire.request_id, wire.attempt)
        return Request(key, prompt, sampling.max_tokens, params, sampling.min_tokens, stop_ids)

    def end(self, key: Key) -> None:
        if self.attempts.pop(key, None) is not None:
            self.thread.cancel(key)

    def _deliver(self, found: list[Token] | Exception) -> None:
        if isinstance(found, Exception):
            self.failure = found
            self.ended.set()
            return
        for token in found:
            if (attempt := self.attempts.get(token.key)) is not None:  # type: ignore[call-overload]
                if token.position == 0:
                    attempt.first.put_nowait(token)
                attempt.all.put_nowait(token)


class Side(generation_pb2_grpc.GenerationServicer, bootstrap_pb2_grpc.BootstrapServicer):
    def __init__(self, shared: Undivided, prefill: bool) -> None:
        self._shared, self._prefill = shared, prefill
        self.address = ""

    async def Describe(self, request: Any, context: Any) -> bootstrap_pb2.DescribeResponse:
        shared, facts = self._shared, self._shared.facts
        role = common_pb2.ROLE_PREFILL if self._prefill else common_pb2.ROLE_DECODE
        name = "prefill-0" if self._prefill else "decode-0"
        return bootstrap_pb2.DescribeResponse(
            instance=common_pb2.InstanceRef(instance_id=name, address=self.address, epoch=1),
            role=role, serving=True, protocol_version=1, model_name=shared.model_name, model_digest=facts.digest,
            num_layers=facts.num_layers, kv_heads=facts.kv_heads, head_dim=facts.head_dim, page_size=PAGE_SIZE,
            kv_dtype="float32", max_model_len=facts.max_positions, pages=shared.pages, vocab_size=facts.vocab_size,
            transfer_backend="none",
            load=bootstrap_pb2.Load(free_pages=shared.free_pages, requests=len(shared.attempts)),
        )  # fmt: skip

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        shared, key = self._shared, (request.request_id, request.attempt)
        try:
            asked = shared.request_of(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if len(shared.attempts) >= _MOST_REQUESTS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MOST_REQUESTS} requests are here already")
        attempt = shared.attempts.setdefault(key, Attempt())
        if self._prefill and attempt.started:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "this attempt is here already")
        whole = False
        try:
            if self._prefill:
                attempt.started = True
                shared.thread.add(asked)
                token = await attempt.first.get()
                yield _chunk(token)
                yield _outcome(_FINISHES.get(token.finish, Kind.KIND_HANDED_OVER), 1)
                whole = True
                return
            while not whole:
                token = await attempt.all.get()
                if token.position:
                    yield _chunk(token)
                if token.finish:
                    yield _outcome(_FINISHES[token.finish], token.position + 1)
                    whole = True
            shared.attempts.pop(key, None)
        finally:
            if not whole:
                shared.end(key)

    async def Abort(self, request: generation_pb2.AbortRequest, context: Any) -> generation_pb2.AbortResponse:
        self._shared.end((request.request_id, request.attempt))
        return generation_pb2.AbortResponse()


def _chunk(token: Token) -> generation_pb2.GenerateResponse:
    told = generation_pb2.TokenChunk(position=token.position, tokens=[generation_pb2.Token(id=token.chosen.token)])
    return generation_pb2.GenerateResponse(tokens=told)


def _outcome(kind: Kind.ValueType, count: int) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(outcome=generation_pb2.Outcome(kind=kind, output_tokens=count))


@asynccontextmanager
async def serving(shared: Undivided) -> AsyncIterator[list[str]]:
    """Yields the addresses of both sides: prefill, decode."""
    servers, addresses = [], []
    for side in (Side(shared, prefill=True), Side(shared, prefill=False)):
        server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])
        generation_pb2_grpc.add_GenerationServicer_to_server(side, server)
        bootstrap_pb2_grpc.add_BootstrapServicer_to_server(side, server)
        side.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
        addresses.append(side.address)
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(grace=None)
        shared.thread.stop()


async def serve(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    facts = read_facts(str(options.model), "", 1)
    layers = range(facts.num_layers)
    budget = options.kv_memory << 20
    pages = pages_that_fit(budget, facts.num_layers, PAGE_SIZE, facts.kv_heads, facts.head_dim, torch.float32)
    stage = Stage.load(options.model, layers, pages, PAGE_SIZE)
    engine = UndividedEngine(stage, sample, options.chunk_size)
    shared = Undivided(engine, facts, options.model.name, pages)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, shared.ended.set)
    async with serving(shared) as addresses:
        print("\n".join(addresses), flush=True)
        await shared.ended.wait()
    if shared.failure is not None:
        print(f"undivided_server: {type(shared.failure).__name__}: {shared.failure}", file=sys.stderr)
    return int(shared.failure is not None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.undivided_server", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=1, help="that compute (default: 1)")
    parser.add_argument(
        "--chunk-size", type=int, default=512, metavar="N", help="prompt tokens of a step (default: 512)"
    )
    parser.add_argument("--kv-memory", type=int, default=1024, metavar="MIB", help="of the pool (default: 1024)")
    return asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
