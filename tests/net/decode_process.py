"""A decode rank on a host of its own: `python -m tests.net.decode_process BACKEND HOST INSTANCE`.

It meets prefill instances as in production, by `DecodePort`. Lines of JSON: see `serve.py`. In:

    ["open", room, address, epoch, pages]      address: where the prefill instance answers `Describe`
    ["stop", room]                             as a log whose deadline has passed
    ["close", room]

A good hand-over says whether its bytes are exact. Released pages are overwritten at once, as by their next
owner, and the status counts how many of their bytes did not stay so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy
import zmq

from consensus.entry import Key, PeerRef
from decode.io.port import DecodePort
from pipeline.effects import CloseRoom, OpenRoom, SendDestinations, StopRoom
from pipeline.local import Observation
from tests.net.content import NEXT_DESTINATION, PAGE_SIZE, TOPOLOGY, SharedPool, content, start_engine
from tests.net.prefill_process import TIMED_OUT
from tests.net.serve import Seen, serve
from tests.transfer.rig import PREFILL, terms
from transfer.actions import Peer
from transfer.io.receiving_port import ReceivingPort


class DecodeRank:
    def __init__(self, backend: str, host: str, instance: str) -> None:
        self._pool = SharedPool()
        self._pages: dict[str, list[int]] = {}  # of rooms that may be written
        self._released: dict[str, list[int]] = {}  # of rooms that failed, until someone else gets them
        engine = start_engine(backend, host, self._pool)
        self._receiving = ReceivingPort(
            Peer(instance, 1, 0), TOPOLOGY, self._pool.regions, engine, terms(backend), host
        )
        self._port = DecodePort(self._receiving)

    def register(self, poller: zmq.Poller) -> None:
        self._port.register(poller)

    def perform(self, command: list[Any]) -> list[Seen]:
        match command:
            case ["open", room, address, epoch, pages]:
                taken = [page for other in self._pages.values() for page in other]
                assert not set(pages) & set(taken), "these pages may still be written"
                for other, released in self._released.items():
                    self._released[other] = [page for page in released if page not in pages]
                self._pages[room] = pages
                self._pool.data[:, :, pages] = 0
                request, _, attempt = room.rpartition("/")
                key, peer = Key(request, int(attempt)), PeerRef(PREFILL, address, epoch)
                return self._seen(self._port.perform(OpenRoom(key, peer, len(pages) * PAGE_SIZE)))
            case ["stop", room]:
                return self._seen(self._port.perform(StopRoom(room, TIMED_OUT)))
            case ["close", room]:
                return self._seen(self._port.perform(CloseRoom(room)))
        raise ValueError(f"what is {command}?")

    def on_readable(self) -> list[Seen]:
        return self._seen(self._port.on_readable())

    def tick(self) -> list[Seen]:
        return self._seen(self._port.tick())

    def status(self) -> dict[str, object]:
        side = self._receiving.side
        return {
            "rooms": [room.room for room in side.rooms()],
            "unfenced": side.unfenced(),
            "damaged": side.counters.damaged,
            "landed": {room: self._landed(pages) for room, pages in self._pages.items()},
            "late": sum(self._late(pages) for pages in self._released.values()),
        }

    def close(self) -> None:
        self._port.close()

    def _landed(self, pages: list[int]) -> int:
        """Pages of which something has come."""
        return int(self._pool.data[0, 0, pages, 0, :8].any(axis=1).sum())

    def _late(self, pages: list[int]) -> int:
        return int(numpy.count_nonzero(self._pool.data[:, :, pages] != NEXT_DESTINATION))

    def _seen(self, observed: Sequence[Observation]) -> list[Seen]:
        seen: list[Seen] = []
        waiting = list(observed)
        while waiting:
            one = waiting.pop(0)
            exact = False
            if one.topic == "prealloc" and one.good:
                waiting += self._port.perform(SendDestinations(one.room, tuple(self._pages[one.room])))
            elif one.topic == "transfer" and one.good:  # from now on nobody else writes there
                pages = self._pages.pop(one.room)
                exact = numpy.array_equal(self._pool.data[:, :, pages], content(one.room, len(pages)))
            elif one.topic == "release":
                self._released[one.room] = pages = self._pages.pop(one.room)
                self._pool.data[:, :, pages] = NEXT_DESTINATION
            seen.append(Seen(one.room, one.topic, one.good, one.reason, exact))
        return seen


if __name__ == "__main__":
    serve(DecodeRank(*sys.argv[1:]))
