"""One room on one decode rank.

In: "the peer is ready", our pages, what each source says, stops, proofs of death.
Out: actions. Each source rank that the plan names is an `Origin`.

    handshaking -> ready -> receiving -> done
          any of these -> failed -> fenced          (done and fenced absorb)

Invariants: destinations are sent only in `receiving`; `done` needs `Finished` of every
source, each with exactly what the plan says must arrive; `fenced` needs, of every source
that was told our pages, a `Finished`, a `Stopped` or the proof that it is dead. Until
then a write may land, and the pages stay with the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .actions import Observe, Peer, ReceiverAction, Send
from .messages import Destinations, Finished, FinishedAck, Stop
from .plan import Target, TransferPlan


class Receiving(Enum):
    HANDSHAKING = "handshaking"
    READY = "ready"
    RECEIVING = "receiving"
    DONE = "done"
    FAILED = "failed"
    FENCED = "fenced"


LEGAL: dict[Receiving, tuple[Receiving, ...]] = {
    Receiving.HANDSHAKING: (Receiving.READY, Receiving.FAILED),
    Receiving.READY: (Receiving.RECEIVING, Receiving.FAILED),
    Receiving.RECEIVING: (Receiving.DONE, Receiving.FAILED),
    Receiving.DONE: (),
    Receiving.FAILED: (Receiving.FENCED,),
    Receiving.FENCED: (),
}


@dataclass(slots=True)
class Origin:
    """What this room hears from one source rank."""

    peer: Peer
    flow: Target
    needs_token: bool
    finished: bool = False
    fenced: bool = False


class ReceivingRoom:
    def __init__(self, room: str, instance: str, epoch: int, prompt_len: int) -> None:
        self.room, self.instance, self.epoch, self.prompt_len = room, instance, epoch, prompt_len
        self.state = Receiving.HANDSHAKING
        self.reason = ""
        self.closed = False
        self.origins: dict[int, Origin] = {}
        self._plan: TransferPlan | None = None
        self._sent: Destinations | None = None
        self._token = b""
        self._told: dict[str, bool] = {}

    # ---- what others ask

    @property
    def live(self) -> bool:
        return self.state in (Receiving.HANDSHAKING, Receiving.READY, Receiving.RECEIVING)

    @property
    def quiet(self) -> bool:
        """No remote write of this room can land any more."""
        return self.state in (Receiving.DONE, Receiving.FENCED)

    @property
    def unfenced(self) -> int:
        return 0 if self._sent is None else sum(not origin.fenced for origin in self.origins.values())

    def fits(self, instance: str, epoch: int) -> bool:
        return self.instance == instance and self.epoch in (0, epoch)

    # ---- what happens to it

    def ready(self, epoch: int, plan: TransferPlan, rank: int) -> list[ReceiverAction]:
        if self.state is not Receiving.HANDSHAKING:
            return []
        self.epoch, self._plan = epoch, plan
        for flow in plan.sources(rank):
            needs_token = rank == 0 and flow.rank == plan.sampler
            self.origins[flow.rank] = Origin(Peer(self.instance, epoch, flow.rank), flow, needs_token)
        self._become(Receiving.READY)
        return self._observe("prealloc", True)

    def send_destinations(self, pages: Sequence[int]) -> list[ReceiverAction]:
        if self.state is not Receiving.READY:  # failed or stopped meanwhile: never hand out pages then
            return []
        assert self._plan is not None
        assert len(pages) * self._plan.source.page_size >= self.prompt_len, "too few pages for the prompt"
        self._sent = Destinations(self.room, self.prompt_len, tuple(pages))
        self._become(Receiving.RECEIVING)
        return [Send(origin.peer, self._sent) for origin in self.origins.values()]

    def finished(self, peer: Peer, message: Finished) -> list[ReceiverAction]:
        origin = self.origins.get(peer.rank)
        if origin is None or self._sent is None:
            return self.fail(f"{peer} finished a room it had no destinations of")
        actions: list[ReceiverAction] = [Send(peer, FinishedAck(self.room))]
        origin.fenced = True
        if self.state is not Receiving.RECEIVING or origin.finished:
            return actions + self._settle()
        assert self._plan is not None
        want = (self.prompt_len, origin.flow.layers, self._plan.bytes(origin.flow, self.prompt_len), origin.needs_token)
        got = (message.tokens, message.layers, message.nbytes, message.first_token is not None)
        if want != got:
            return actions + self.fail(f"{peer} finished with (tokens, layers, bytes, token) {got}, expected {want}")
        origin.finished = True
        self._token = message.first_token or self._token
        if all(other.finished for other in self.origins.values()):
            self._become(Receiving.DONE)
            actions += self._observe("transfer", True, payload=self._token)
        return actions

    def stopped(self, peer: Peer) -> list[ReceiverAction]:
        """A fence of that source. Unasked, it means the room will never be completed."""
        origin = self.origins.get(peer.rank)
        if origin is None or self._sent is None:
            return []
        origin.fenced = True
        return self.fail(f"{peer} stopped") + self._settle()

    def dead(self, reason: str) -> list[ReceiverAction]:
        """Every source is proven dead and its last bytes have landed or never will."""
        for origin in self.origins.values():
            origin.fenced = True
        return self.fail(reason) + self._settle()

    def stop(self, reason: str) -> list[ReceiverAction]:
        """The log ended the room: it knows why, so only the release is worth telling."""
        actions = self.fail(reason, tell=False)
        return actions + (self._observe("release", True) if self.quiet else [])

    def fail(self, reason: str, tell: bool = True) -> list[ReceiverAction]:
        if not self.live:
            return []
        topic = "prealloc" if self.state is Receiving.HANDSHAKING else "transfer"
        self._become(Receiving.FAILED)
        self.reason = reason
        actions: list[ReceiverAction] = self._observe(topic, False, reason) if tell else []
        return actions + self.ask_for_fences() + self._settle()

    def ask_for_fences(self) -> list[ReceiverAction]:
        """Also those who never learnt our pages are told, so that they end their side."""
        return [
            Send(origin.peer, Stop(self.room, self.reason[:1000]))
            for origin in self.origins.values()
            if not origin.fenced
        ]

    def repeat(self, peer: Peer) -> list[ReceiverAction]:
        """Say again what this source may have missed: the link is new."""
        origin = self.origins.get(peer.rank)
        if origin is None or origin.fenced:
            return []
        if self.state is Receiving.FAILED:
            return [Send(peer, Stop(self.room, self.reason[:1000]))]
        if self.state is Receiving.RECEIVING and self._sent is not None:
            return [Send(peer, self._sent)]
        return []

    # ---- inside

    def _become(self, state: Receiving) -> None:
        assert state in LEGAL[self.state], f"{self.room}: {self.state.value} -> {state.value}"
        self.state = state

    def _observe(self, topic: str, good: bool, reason: str = "", payload: bytes = b"") -> list[ReceiverAction]:
        if topic in self._told:
            return []
        self._told[topic] = good
        return [Observe(self.room, topic, good, reason, payload)]

    def _settle(self) -> list[ReceiverAction]:
        if self.state is Receiving.FAILED and self.unfenced == 0:
            self._become(Receiving.FENCED)
            return self._observe("release", True)
        return []
