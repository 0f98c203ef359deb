"""A rank's ends of the ring: which sockets a rank has depends on its place in the pipeline, and on nothing else."""

from __future__ import annotations

import zmq

from pipeline.io.control import RankConfig
from pipeline.io.ring import BackFrame, Inbox, Outbox, RelayFrame, ReportFrame
from security.gatekeeper import Gatekeeper


class Links:
    """This rank's ring sockets; None where the rank has no such end."""

    def __init__(self, config: RankConfig) -> None:
        # A context of its own: the gatekeeper answers for this one's sockets and no others.
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context = self.context
        keys = config.keys
        self.gatekeeper = Gatekeeper(context, keys.ranks)
        first, last = config.rank == 0, config.rank == config.pp_size - 1
        self.relay_in: Inbox[RelayFrame] | None = None if first else Inbox(context, config.relay_in, keys, RelayFrame)
        self.relay_out = None if last else Outbox(context, config.relay_out, keys, config.rank + 1)
        ring = config.pp_size > 1
        self.back_in: Inbox[BackFrame] | None = None
        self.report_in: Inbox[ReportFrame] | None = None
        if first and ring:
            self.back_in = Inbox(context, config.returns, keys, BackFrame)
            self.report_in = Inbox(context, config.store, keys, ReportFrame)
        self.back_out = Outbox(context, config.returns, keys, 0) if last and ring else None
        self.report_out = None if first else Outbox(context, config.store, keys, 0)

    def outboxes(self) -> list[Outbox]:
        return [box for box in (self.relay_out, self.back_out, self.report_out) if box is not None]

    def dropped(self) -> int:
        boxes = (self.relay_in, self.back_in, self.report_in)
        return self.gatekeeper.refused + sum(box.dropped for box in boxes if box is not None)
