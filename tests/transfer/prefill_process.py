"""A prefill rank in a process of its own, to be killed:
`python -m tests.transfer.prefill_process BACKEND EPOCH INSTANCE`.

Prints its address; for a line "ROOM PAGES" on its input it hands over as many of its first pages in that room, and
it says what it observed. For "ROOM PAGES endless" it never samples a token, so that the room cannot end well.
"""

from __future__ import annotations

import sys
import time

import zmq

from tests.transfer.pools import Pool, pipeline
from tests.transfer.rig import DECODE, HOST, engine_for, terms
from transfer.actions import Peer
from transfer.io.sending_port import SendingPort

PAGES, PAGE_SIZE, LAYERS, BYTES_PER_TOKEN = 32, 64, 4, 16384  # 128 MiB
CHUNK = 4 * PAGE_SIZE


def main(backend: str, epoch: int, instance: str) -> None:
    topology = pipeline(1, LAYERS, PAGE_SIZE, BYTES_PER_TOKEN)
    pool = Pool(topology, 0, PAGES, seed=1)
    engine = engine_for(backend, pool)
    port = SendingPort(Peer(instance, epoch, 0), topology, pool.regions, engine, terms(backend), HOST)
    print(port.address, flush=True)
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    ticked = 0.0
    pages: dict[str, int] = {}
    endless: dict[str, bool] = {}
    while True:
        port.register(poller)
        ready = dict(poller.poll(200))
        observed = port.on_readable()
        if sys.stdin.fileno() in ready:
            line = sys.stdin.readline().split()
            if not line:
                break
            pages[line[0]], endless[line[0]] = int(line[1]), len(line) > 2
            observed += port.open(line[0], DECODE, 0, int(line[1]) * PAGE_SIZE)
        if time.monotonic() - ticked > 0.5:
            ticked = time.monotonic()
            observed += port.tick()
        while observed:
            seen = observed.pop(0)
            print(seen.topic, seen.good, seen.reason, flush=True)
            if seen.topic == "bootstrap" and seen.good:
                tokens = pages[seen.room] * PAGE_SIZE
                observed += port.start(seen.room, range(pages[seen.room]))
                for start in range(0, tokens, CHUNK):
                    observed += port.written(seen.room, start, min(tokens, start + CHUNK), (0, LAYERS))
                if not endless[seen.room]:
                    observed += port.first_token(seen.room, b"t")
    port.close_port()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
