"""The life of an attempt on a decode instance: one table of legal steps. Data only.

    prealloc ─▶ granted ─▶ transferring ─▶ ready ─▶ running ─▶ done
        │          │            │    │        │    ╱      ▲
        └──────────┴─▶ done     │    │     spilling       │      (each of these four also ─▶ done,
                                │    └─▶ done  │        filling   and the two that copy ─▶ aborting)
                                │          retracted ──────┘
                                └─▶ aborting ─▶ done

prealloc      handshakes with the prefill ranks that feed this rank (prealloc vote)
granted       may have pages as soon as there are enough
transferring  owns pages; prefill's ranks write into them (transfer vote)
ready         all KV and the first token are here; not yet in a batch
running       generates
spilling      gives its pages back as soon as every rank has saved their KV (spill vote)
retracted     holds no page; its KV is in host memory
filling       owns pages again; its KV is being put back (fill vote)
aborting      its outcome is told; its pages wait until no remote write or copy can land (release vote)
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from consensus.entry import FILL, PREALLOC, RELEASE, SPILL, TRANSFER
from pipeline.request import ABORTING, DONE

PREALLOCATING: Final = "prealloc"
GRANTED: Final = "granted"
TRANSFERRING: Final = "transferring"
READY: Final = "ready"
RUNNING: Final = "running"
SPILLING: Final = "spilling"
RETRACTED: Final = "retracted"
FILLING: Final = "filling"

TRANSITIONS = MappingProxyType(
    {
        PREALLOCATING: (GRANTED, DONE),
        GRANTED: (TRANSFERRING, DONE),
        TRANSFERRING: (READY, ABORTING, DONE),
        READY: (RUNNING, SPILLING, DONE),
        RUNNING: (SPILLING, DONE),
        SPILLING: (RETRACTED, ABORTING, DONE),
        RETRACTED: (FILLING, DONE),
        FILLING: (RUNNING, ABORTING, DONE),
        ABORTING: (DONE,),
        DONE: (),
    }
)
TOPICS = MappingProxyType(
    {PREALLOCATING: PREALLOC, TRANSFERRING: TRANSFER, SPILLING: SPILL, FILLING: FILL, ABORTING: RELEASE}
)
TIMED = frozenset({PREALLOCATING})
GROWING = (TRANSFERRING, READY, RUNNING, FILLING)  # own pages, and will need more of them
