"""The life of an attempt on a decode instance: one table of legal steps. Data only.

    prealloc ─▶ granted ─▶ transferring ─▶ ready ─▶ running ─▶ done
        │          │            │    │        │
        └──────────┴─▶ done     │    └────────┴─▶ done
                                └─▶ aborting ─▶ done

prealloc      handshakes with the prefill ranks that feed this rank (prealloc vote)
granted       may have pages as soon as there are enough
transferring  owns pages; prefill's ranks write into them (transfer vote)
ready         all KV and the first token are here; not yet in a batch
running       generates
aborting      its outcome is told; its pages wait until no remote write can land (release vote)
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from consensus.entry import PREALLOC, RELEASE, TRANSFER
from pipeline.request import ABORTING, DONE

PREALLOCATING: Final = "prealloc"
GRANTED: Final = "granted"
TRANSFERRING: Final = "transferring"
READY: Final = "ready"
RUNNING: Final = "running"

TRANSITIONS = MappingProxyType(
    {
        PREALLOCATING: (GRANTED, DONE),
        GRANTED: (TRANSFERRING, DONE),
        TRANSFERRING: (READY, ABORTING, DONE),
        READY: (RUNNING, DONE),
        RUNNING: (DONE,),
        ABORTING: (DONE,),
        DONE: (),
    }
)
TOPICS = MappingProxyType({PREALLOCATING: PREALLOC, TRANSFERRING: TRANSFER, ABORTING: RELEASE})
TIMED = frozenset({PREALLOCATING})
