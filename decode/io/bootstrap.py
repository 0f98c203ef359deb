"""Asks prefill instances what they are, so that this decode rank can dial their ranks.

In: (instance, address, epoch) of a peer that a room needs. Out: `Found` or `Unreachable`, announced on
an eventfd. gRPC's own threads do the waiting; the control loop never does. An instance that is not
there yet is waited for, up to the deadline (it may still be starting, or its name not yet resolvable).
"""

from __future__ import annotations

import os
import queue
from dataclasses import dataclass

import grpc

from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc
from security.channels import dial_blocking
from security.secrets import Secrets

DEADLINE = 10.0  # seconds for one answer, connecting included
KEEPALIVE = (("grpc.keepalive_time_ms", 10_000), ("grpc.http2.ping_timeout_ms", 5_000))


@dataclass(frozen=True, slots=True)
class Found:
    instance: str
    description: bootstrap_pb2.DescribeResponse


@dataclass(frozen=True, slots=True)
class Unreachable:
    instance: str
    reason: str


class Bootstrap:
    """One outstanding question per instance; answers come out of `answers()` when `fd` is readable.

    An instance that is named with another address is asked there at once: it may have moved to another host,
    and what its old address still says, if only that it cannot be reached, means nothing any more."""

    def __init__(self, secrets: Secrets | None = None) -> None:
        self._secrets = secrets
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._answers: queue.SimpleQueue[tuple[grpc.Future, Found | Unreachable]] = queue.SimpleQueue()
        self._channels: dict[str, grpc.Channel] = {}
        self._asking: dict[str, tuple[str, grpc.Future]] = {}

    @property
    def asking(self) -> int:
        return len(self._asking)

    def ask(self, instance: str, address: str, epoch: int) -> None:
        """`epoch` 0 accepts any incarnation; another one than the expected is an error that names both."""
        before, question = self._asking.get(instance, ("", None))
        if before == address:
            return
        if address not in self._channels:
            self._channels[address] = dial_blocking(address, self._secrets, KEEPALIVE)
        stub = bootstrap_pb2_grpc.BootstrapStub(self._channels[address])
        call = stub.Describe.future(bootstrap_pb2.DescribeRequest(), timeout=DEADLINE, wait_for_ready=True)
        self._asking[instance] = (address, call)
        if question is not None:
            question.cancel()
        call.add_done_callback(lambda done: self._answered(instance, address, epoch, done))

    def answers(self) -> list[Found | Unreachable]:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        found: list[Found | Unreachable] = []
        while not self._answers.empty():
            call, answer = self._answers.get_nowait()
            if self._asking.get(answer.instance, ("", None))[1] is call:
                del self._asking[answer.instance]
                found.append(answer)
        return found

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _answered(self, instance: str, address: str, epoch: int, call: grpc.Future) -> None:
        """On a gRPC thread: only judges the answer and hands it over."""
        answer: Found | Unreachable
        try:
            answer = _judge(instance, epoch, call.result())
        except grpc.RpcError as error:
            details = error.details() if isinstance(error, grpc.Call) else str(error)
            answer = Unreachable(instance, f"{instance} at {address} did not answer: {details}")
        except Exception as error:  # a cancelled call, or a malformed answer
            answer = Unreachable(instance, f"{instance} at {address}: {type(error).__name__}: {error}")
        self._answers.put((call, answer))
        os.eventfd_write(self.fd, 1)


def _judge(instance: str, epoch: int, answer: bootstrap_pb2.DescribeResponse) -> Found | Unreachable:
    there = answer.instance
    if there.instance_id != instance:
        return Unreachable(instance, f"expected instance {instance}, {there.address} is {there.instance_id}")
    if epoch not in (0, there.epoch):
        return Unreachable(instance, f"{instance} epoch {epoch} is gone, epoch {there.epoch} answers")
    # One that drains finishes what it has, and this peer asks for nothing else.
    if not answer.serving and not answer.draining:
        return Unreachable(instance, f"{instance} is not serving: {answer.not_serving_reason}")
    return Found(instance, answer)
