"""Between the gateway's own types and the generated gRPC ones.

In and out: both kinds of types. Nothing else in the gateway reads or fills protobuf messages,
except the calls themselves (`registry`, `attempt`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import grpc

from gateway.config import GatewayConfig
from gateway.generation_job import Job, Sampling
from gateway.instances import Instance, Side
from gateway.merge import Event, Merge, SideEnd, Token
from gateway.workbook import Report
from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc
from security.channels import dial
from security.secrets import Secrets

PROTO_ROLE = {Side.PREFILL: common_pb2.ROLE_PREFILL, Side.DECODE: common_pb2.ROLE_DECODE}

_SIDE_ENDS = {
    generation_pb2.Outcome.KIND_HANDED_OVER: SideEnd.HANDED_OVER,
    generation_pb2.Outcome.KIND_STOP: SideEnd.STOP,
    generation_pb2.Outcome.KIND_LENGTH: SideEnd.LENGTH,
    generation_pb2.Outcome.KIND_ABORT: SideEnd.ABORT,
    generation_pb2.Outcome.KIND_ERROR: SideEnd.ERROR,
}


@dataclass(frozen=True, slots=True)
class Link:
    """The connection to one instance."""

    address: str
    channel: grpc.aio.Channel
    bootstrap: bootstrap_pb2_grpc.BootstrapAsyncStub
    generation: generation_pb2_grpc.GenerationAsyncStub


def connect(address: str, config: GatewayConfig, secrets: Secrets | None) -> Link:
    channel = dial(
        address,
        secrets,
        options=[
            # A stopped process keeps its sockets open: only unanswered pings show that it is gone. The
            # server must allow such frequent pings (grpc.http2.max_ping_strikes=0).
            ("grpc.keepalive_time_ms", int(config.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(config.keepalive_timeout_s * 1000)),
            # The keepalive timeout alone is not obeyed: without this one gRPC waits a minute for the answer.
            ("grpc.http2.ping_timeout_ms", int(config.keepalive_timeout_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            # A restarted instance must be found again within seconds, not after gRPC's usual two minutes.
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 3000),
            ("grpc.max_receive_message_length", 16 * 1024 * 1024),
        ],
    )
    return Link(
        address,
        channel,
        # Over an asyncio channel the same stubs are asynchronous; gRPC's own types do not say so.
        cast("bootstrap_pb2_grpc.BootstrapAsyncStub", bootstrap_pb2_grpc.BootstrapStub(channel)),
        cast("generation_pb2_grpc.GenerationAsyncStub", generation_pb2_grpc.GenerationStub(channel)),
    )


def cancelled_by_us() -> bool:
    """Whether a CancelledError is a cancellation of this task: a call that the server cancelled raises one too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def instance_from(dialed: str, side: Side, description: bootstrap_pb2.DescribeResponse) -> Instance:
    ref = description.instance
    return Instance(
        dialed=dialed,
        side=side,
        instance_id=ref.instance_id or dialed,
        address=ref.address or dialed,
        epoch=ref.epoch,
        protocol_version=description.protocol_version,
        model_name=description.model_name,
        model_digest=description.model_digest,
        num_layers=description.num_layers,
        kv_heads=description.kv_heads,
        head_dim=description.head_dim,
        page_size=description.page_size,
        kv_dtype=description.kv_dtype,
        max_model_len=description.max_model_len,
        pages=description.pages,
        vocab_size=description.vocab_size,
        transfer_backend=description.transfer_backend,
    )


def refused_for_draining(error: grpc.aio.AioRpcError) -> bool:
    """The instance takes nothing new, and nothing of it has failed."""
    return any(key == "paceline-draining" for key, _ in error.trailing_metadata() or ())


def report_from(description: bootstrap_pb2.DescribeResponse) -> Report | None:
    """None if it does not tell its load."""
    if not description.HasField("load"):
        return None
    load = description.load
    rate = load.prefill_tokens_per_second
    return Report(
        queued_tokens=load.queued_prefill_tokens,
        free_pages=load.free_pages,
        requests=load.requests,
        prefill_rate=rate if 0.0 < rate < math.inf else 0.0,
    )


def _sampling(sampling: Sampling) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
    )


def generate_request(
    request_id: str,
    attempt: int,
    job: Job,
    delivered: Sequence[int],
    instance: Instance,
    peer: Instance,
    timeout_s: float,
    room_token: bytes,
) -> generation_pb2.GenerateRequest:
    """What `instance` is asked. `delivered`: output of earlier attempts, behind which this one goes on."""
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        attempt=attempt,
        prompt_ids=(*job.prompt_ids, *delivered),
        sampling=_sampling(job.sampling),
        peer=common_pb2.InstanceRef(instance_id=peer.instance_id, address=peer.address, epoch=peer.epoch),
        timeout_s=timeout_s,
        resumed=len(delivered),
        epoch=instance.epoch,
        room_token=room_token,
    )


def _token(token: generation_pb2.Token) -> Token:
    if not token.HasField("logprob"):
        return Token(token.id)
    return Token(token.id, token.logprob, tuple((top.id, top.logprob) for top in token.top))


def tell(merge: Merge, side: Side, response: generation_pb2.GenerateResponse) -> list[Event]:
    """Feeds one message of a side's stream into the merge."""
    event = response.WhichOneof("event")
    if event == "tokens":
        chunk = response.tokens
        return merge.tokens(side, chunk.position, [_token(token) for token in chunk.tokens])
    if event == "outcome":
        outcome = response.outcome
        end = _SIDE_ENDS.get(outcome.kind, SideEnd.ERROR)
        return merge.outcome(
            side, end, outcome.reason, outcome.output_tokens, outcome.retryable, outcome.hand_over, outcome.draining
        )
    return []  # an event of a newer protocol
