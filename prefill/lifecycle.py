"""The life of an attempt on a prefill instance: one table of legal steps. Data only.

    bootstrapping ─▶ waiting ─▶ running ─▶ inflight ─▶ done
          │             │          │           │
          └─────────────┴─▶ done   └─▶ aborting ◀┘ ─▶ done

bootstrapping  the decode side has not yet told where the KV goes (agreed through PPConsensusStore)
waiting        admitted, owns no pages
running        owns pages; chunks are being launched
inflight       the first token is out; KV is still on its way (transfer vote)
aborting       its outcome is told; its pages wait until the sender is quiet (release vote)
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from consensus.entry import RELEASE, TRANSFER
from pipeline.request import ABORTING, DONE

BOOTSTRAPPING: Final = "bootstrapping"
WAITING: Final = "waiting"
RUNNING: Final = "running"
INFLIGHT: Final = "inflight"

TRANSITIONS = MappingProxyType(
    {
        BOOTSTRAPPING: (WAITING, DONE),
        WAITING: (RUNNING, DONE),
        RUNNING: (INFLIGHT, ABORTING),
        INFLIGHT: (DONE, ABORTING),
        ABORTING: (DONE,),
        DONE: (),
    }
)
TOPICS = MappingProxyType({INFLIGHT: TRANSFER, ABORTING: RELEASE})
TIMED = frozenset({INFLIGHT})
