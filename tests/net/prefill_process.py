"""A prefill rank on a host of its own: `python -m tests.net.prefill_process BACKEND HOST EPOCH`.

It also answers `Describe` on `BOOTSTRAP_PORT`, as its daemon would. Lines of JSON: see `serve.py`. In:

    ["open", room, decode instance, pages]     once the room is bootstrapped, its content is written and pushed
    ["stop", room]                             as a log whose deadline has passed
    ["close", room]

Source pages are overwritten at once when nothing reads them any more, as by their next owner.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import zmq

from paceline_proto.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2
from tests.net.content import LAYERS, NEXT_SOURCE, PAGE_SIZE, TOPOLOGY, SharedPool, content, start_engine
from tests.net.serve import Seen, serve
from tests.transfer.rig import PREFILL, terms
from transfer.actions import Observe, Peer
from transfer.io.engine import TransferEngine
from transfer.io.sending_port import SendingPort
from transfer.replacement import DEFAULT_LIMITS

BOOTSTRAP_PORT = 5100
LIMITS = replace(DEFAULT_LIMITS, give_up=15.0)  # in production it is minutes
CHUNKS = 4
TIMED_OUT = "the hand-over took too long"


class PrefillRank:
    def __init__(self, backend: str, host: str, epoch: int) -> None:
        self._pool = SharedPool()
        self._pages: dict[str, list[int]] = {}

        def make() -> TransferEngine:
            return start_engine(backend, host, self._pool)

        self._port = SendingPort(
            Peer(PREFILL, epoch, 0),
            TOPOLOGY,
            self._pool.regions,
            make(),
            terms(backend),
            host,
            engine_factory=make,
            limits=LIMITS,
        )
        self._bootstrap = _serve_bootstrap(host, epoch, self._port.address)

    def register(self, poller: zmq.Poller) -> None:
        self._port.register(poller)

    def perform(self, command: list[Any]) -> list[Seen]:
        match command:
            case ["open", room, instance, pages]:
                self._pages[room] = pages
                return self._seen(self._port.open(room, instance, 1, len(pages) * PAGE_SIZE))
            case ["stop", room]:
                return self._seen(self._port.stop(room, TIMED_OUT))
            case ["close", room]:
                return self._seen(self._port.close(room))
        raise ValueError(f"what is {command}?")

    def on_readable(self) -> list[Seen]:
        return self._seen(self._port.on_readable())

    def tick(self) -> list[Seen]:
        return self._seen(self._port.tick())

    def status(self) -> dict[str, object]:
        side = self._port.side
        return {
            "rooms": [room.room for room in side.rooms()],
            "in_flight": side.in_flight(),
            "unproven": side.unproven(),
            "trailing": side.trailing(),
            "held": self._port.held,
            "replacements": self._port.slot.replacements,
            "outstanding": self._port.slot.handles_outstanding,
        }

    def close(self) -> None:
        self._bootstrap.stop(None)
        self._port.close_port()

    def _seen(self, observed: Sequence[Observe]) -> list[Seen]:
        seen: list[Seen] = []
        waiting = list(observed)
        while waiting:
            one = waiting.pop(0)
            seen.append(Seen(one.room, one.topic, one.good, one.reason))
            if one.topic == "bootstrap" and one.good:
                waiting += self._push(one.room)
            elif one.topic == "release" or (one.topic == "transfer" and one.good):
                self._pool.data[:, :, self._pages.pop(one.room)] = NEXT_SOURCE
        return seen

    def _push(self, room: str) -> list[Observe]:
        pages = self._pages[room]
        tokens = len(pages) * PAGE_SIZE
        self._pool.data[:, :, pages] = content(room, len(pages))
        observed = self._port.start(room, pages)
        cuts = [tokens * chunk // CHUNKS for chunk in range(CHUNKS + 1)]
        for start, end in zip(cuts, cuts[1:], strict=False):
            observed += self._port.written(room, start, end, (0, LAYERS))
        return observed + self._port.first_token(room, b"t")


class _Bootstrap(bootstrap_pb2_grpc.BootstrapServicer):
    def __init__(self, answer: bootstrap_pb2.DescribeResponse) -> None:
        self._answer = answer

    def Describe(self, request: bootstrap_pb2.DescribeRequest, context: Any) -> bootstrap_pb2.DescribeResponse:
        return self._answer


def _serve_bootstrap(host: str, epoch: int, link_address: str) -> grpc.Server:
    address = f"{host}:{BOOTSTRAP_PORT}"
    answer = bootstrap_pb2.DescribeResponse(
        instance=common_pb2.InstanceRef(instance_id=PREFILL, address=address, epoch=epoch),
        serving=True,
        ranks=[bootstrap_pb2.RankDescription(rank=0, layer_begin=0, layer_end=LAYERS, link_address=link_address)],
    )
    server = grpc.server(ThreadPoolExecutor(1))
    bootstrap_pb2_grpc.add_BootstrapServicer_to_server(_Bootstrap(answer), server)
    assert server.add_insecure_port(address)
    server.start()
    return server


if __name__ == "__main__":
    serve(PrefillRank(sys.argv[1], sys.argv[2], int(sys.argv[3])))
