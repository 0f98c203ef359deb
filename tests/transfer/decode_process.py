"""A decode rank in a process of its own, to be killed or frozen:
`python -m tests.transfer.decode_process BACKEND INSTANCE ADDRESS EPOCH`, the address being a prefill rank's.

Opens whatever room a line on its input names and says what it observed. A released room's pages are at once
overwritten, as a next owner would, and `check` says how many of their bytes did not stay so; `stray`, how many bytes
of pages that no room ever had are not as at the start.
"""

from __future__ import annotations

import sys
import time

import numpy
import zmq

from tests.transfer.pools import BLANK, Pool, pipeline
from tests.transfer.prefill_process import BYTES_PER_TOKEN, LAYERS, PAGE_SIZE, PAGES
from tests.transfer.rig import HOST, PREFILL, engine_for, terms
from transfer.actions import Peer
from transfer.io.receiving_port import ReceivingPort

REUSED = 0x55


def main(backend: str, instance: str, address: str, epoch: str) -> None:
    topology = pipeline(1, LAYERS, PAGE_SIZE, BYTES_PER_TOKEN)
    pool, source = Pool(topology, 0, PAGES), Pool(topology, 0, PAGES, seed=1)
    pages: dict[str, list[int]] = {}
    port = ReceivingPort(
        Peer(instance, int(epoch), 0),
        topology,
        pool.regions,
        engine_for(backend, pool),
        terms(backend),
        HOST,
        peer_timeout=60.0,
    )
    port.introduce(PREFILL, [address])
    print("ready", pool.data.ctypes.data, flush=True)
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    ticked = 0.0
    while True:
        port.register(poller)
        ready = dict(poller.poll(100))
        observed = port.on_readable()
        if sys.stdin.fileno() in ready:
            match sys.stdin.readline().split():
                case ["open", room, first, count]:
                    pages[room] = list(range(int(first), int(first) + int(count)))
                    pool.data[:, :, pages[room]] = 0
                    observed += port.open(room, PREFILL, 1, int(count) * PAGE_SIZE)
                case ["check", room]:
                    changed = int((pool.data[:, :, pages[room]] != REUSED).sum())
                    print("changed", room, changed, flush=True)
                case ["same", room]:
                    same = numpy.array_equal(pool.data[:, :, pages[room]], source.data[:, :, pages[room]])
                    print("same", room, int(same), flush=True)
                case ["stray"]:
                    used = {page for taken in pages.values() for page in taken}
                    others = [page for page in range(PAGES) if page not in used]
                    print("stray", int((pool.data[:, :, others] != BLANK).sum()), flush=True)
                case _:
                    break
        if time.monotonic() - ticked > 0.2:
            ticked = time.monotonic()
            observed += port.tick()
        while observed:
            seen = observed.pop(0)
            if seen.topic == "prealloc" and seen.good:
                observed += port.send_destinations(seen.room, pages[seen.room])
            if seen.topic == "release":
                pool.data[:, :, pages[seen.room]] = REUSED
            print(seen.topic, seen.room, int(seen.good), flush=True)
    port.close_port()


if __name__ == "__main__":
    main(*sys.argv[1:])
