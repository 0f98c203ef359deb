"""One room on one decode rank.

In: "the peer is ready", our pages, what each source says, stops, proofs of death.
Out: actions. Each source rank that the plan names is an `Origin`.

    handshaking -> ready -> receiving -> done
          any of these -> failed -> fenced          (done and fenced absorb)

Invariants: destinations are sent only in `receiving`; `done` needs `Finished` of every
source and every slice it counts, together exactly what the plan says must arrive, each
matching its checksums (a slice that does not is asked for once more, then the room fails);
`fenced` needs, of every source that was told our pages, a `Finished` without anything asked
for since, a `Stopped` or the proof that it is dead; or, under a lease, that it is revoked,
and then nothing else will do. Until then a write may land, and the pages stay with the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from .actions import Grant, Observe, Peer, ReceiverAction, Revoke, Send, Verify
from .extents import spans
from .messages import Again, Destinations, Finished, FinishedAck, Slice, Stop
from .plan import Target, TransferPlan

CHECKSUM_BYTES = 8  # the most, of a page of a layer


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
    slices: dict[int, Slice] = field(default_factory=dict)
    claimed: int = 0  # layers times positions that slices were said to bring, repeats apart
    sound: int = 0  # of them, those in the pool and, if there are checksums, as they were sent
    again: dict[int, int] = field(default_factory=dict)  # number of a damaged slice -> of its repeat, -1 as yet
    word: Finished | None = None
    finished: bool = False
    fenced: bool = False


class ReceivingRoom:
    def __init__(
        self, room: str, instance: str, epoch: int, prompt_len: int, checksums: bool, leased: bool, token: bytes = b""
    ) -> None:
        self._shown = token
        self.room, self.instance, self.epoch, self.prompt_len = room, instance, epoch, prompt_len
        self.state = Receiving.HANDSHAKING
        self.reason = ""
        self.closed = False
        self._checksums = checksums
        self._leased, self._revoked = leased, False
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
        if self._sent is None:
            return 0
        if self._leased:
            return 0 if self._revoked else len(self.origins)
        return sum(not origin.fenced for origin in self.origins.values())

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
        self._sent = Destinations(self.room, self.prompt_len, tuple(pages), self._shown)
        self._become(Receiving.RECEIVING)
        leave: list[ReceiverAction] = [Grant(self.room, self._sent.pages)] if self._leased else []
        return leave + [Send(origin.peer, self._sent) for origin in self.origins.values()]

    def slice(self, peer: Peer, message: Slice) -> list[ReceiverAction]:
        origin = self.origins.get(peer.rank)
        if self.state is not Receiving.RECEIVING or origin is None or message.number in origin.slices:
            return []
        assert self._sent is not None and self._plan is not None
        first, last = message.layers
        whole = origin.flow.layers[0] <= first < last <= origin.flow.layers[1]
        if not whole or not 0 <= message.start < message.end <= self.prompt_len:
            return self.fail(f"{peer} sent layers {message.layers} of [{message.start}, {message.end})")
        parts = tuple(spans(self._sent.pages, message.start, message.end, self._plan.source.page_size))
        longest = CHECKSUM_BYTES * (last - first) * len(parts)
        if len(message.checksums) > longest:  # they are kept until the room ends
            return self.fail(f"{peer} sent {len(message.checksums)} bytes of checksums, {longest} is the most")
        replaces = message.instead_of
        if replaces is None:
            origin.claimed += _area(message)
        elif origin.again.get(replaces) != -1 or not _same(origin.slices[replaces], message):
            return self.fail(f"{peer} sent a slice instead of {replaces}, which was not asked for")
        else:
            origin.again[replaces] = message.number
        if origin.claimed > self._plan.positions(origin.flow, self.prompt_len):
            return self.fail(f"{peer} sent more than {self.prompt_len} positions of layers {origin.flow.layers}")
        origin.slices[message.number] = message
        if not self._checksums:
            return self._arrived(origin, message)
        heads = origin.flow.heads
        return [Verify(self.room, peer.rank, message.number, message.layers, heads, parts, message.checksums)]

    def verified(self, source: int, number: int, sound: bool) -> list[ReceiverAction]:
        """What `Verify` asked for. A damaged slice is asked for once more, the second time it ends the room."""
        if self.state is not Receiving.RECEIVING:
            return []
        origin = self.origins[source]
        message = origin.slices[number]
        if sound:
            return self._arrived(origin, message)
        if message.instead_of is not None:
            damaged = f"layers {message.layers} of positions [{message.start}, {message.end})"
            return self.fail(f"KV of {origin.peer} arrived damaged twice: {damaged}")
        origin.again[number] = -1
        origin.word, origin.fenced = None, False
        return [Send(origin.peer, Again(self.room, number))]

    def finished(self, peer: Peer, message: Finished) -> list[ReceiverAction]:
        origin = self.origins.get(peer.rank)
        if origin is None or self._sent is None:
            return self.fail(f"{peer} finished a room it had no destinations of")
        if message.again != len(origin.again):  # it was said before something was asked for again
            return []
        origin.fenced = True
        if self.state is not Receiving.RECEIVING or origin.finished:
            return [Send(peer, FinishedAck(self.room)), *self._settle()]
        assert self._plan is not None
        want = (self.prompt_len, origin.flow.layers, self._plan.bytes(origin.flow, self.prompt_len), origin.needs_token)
        got = (message.tokens, message.layers, message.nbytes, message.first_token is not None)
        if want != got:
            reason = f"{peer} finished with (tokens, layers, bytes, token) {got}, expected {want}"
            return [Send(peer, FinishedAck(self.room)), *self.fail(reason)]
        origin.word = message
        return self._complete(origin)

    def stopped(self, peer: Peer) -> list[ReceiverAction]:
        """A fence of that source. Unasked, it means the room will never be completed."""
        origin = self.origins.get(peer.rank)
        if origin is None or self._sent is None:
            return []
        origin.fenced = True
        return self.fail(f"{peer} stopped") + self._settle()

    def revoked(self) -> list[ReceiverAction]:
        """No byte can land under the room's lease any more."""
        self._revoked = True
        return self._settle()

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
        return actions + self._end_lease() + self.ask_for_fences() + self._settle()

    def ask_for_fences(self) -> list[ReceiverAction]:
        """Also those who never learnt our pages are told, so that they end their side."""
        return [
            Send(origin.peer, Stop(self.room, self.reason[:1000], self._shown))
            for origin in self.origins.values()
            if not origin.fenced
        ]

    def repeat(self, peer: Peer) -> list[ReceiverAction]:
        """Say again what this source may have missed: the link is new."""
        origin = self.origins.get(peer.rank)
        if origin is None or origin.fenced:
            return []
        if self.state is Receiving.FAILED:
            return [Send(peer, Stop(self.room, self.reason[:1000], self._shown))]
        if self.state is Receiving.RECEIVING and self._sent is not None:
            return [Send(peer, self._sent), *(Send(peer, Again(self.room, number)) for number in origin.again)]
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

    def _arrived(self, origin: Origin, message: Slice) -> list[ReceiverAction]:
        origin.sound += _area(message)
        return self._complete(origin)

    def _complete(self, origin: Origin) -> list[ReceiverAction]:
        """By counting: all the plan names is there, and the source knows of no more."""
        word = origin.word
        if word is None or len(origin.slices) < word.slices:
            return []
        assert self._plan is not None
        if origin.sound < self._plan.positions(origin.flow, self.prompt_len):
            return []
        if not self._whole(origin):
            return self.fail(f"{origin.peer} sent some positions twice, and others never")
        origin.finished = True
        self._token = word.first_token or self._token
        actions: list[ReceiverAction] = [Send(origin.peer, FinishedAck(self.room))]
        if all(other.finished for other in self.origins.values()):
            self._become(Receiving.DONE)
            actions += self._observe("transfer", True, payload=self._token) + self._end_lease()
        return actions

    def _whole(self, origin: Origin) -> bool:
        """Whether the slices cover each layer from end to end."""
        assert self._plan is not None
        parts = [part for number, part in origin.slices.items() if number not in origin.again]
        for layer in range(*origin.flow.layers):
            at = self._plan.source.first(layer, self.prompt_len)
            for start, end in sorted((p.start, p.end) for p in parts if p.layers[0] <= layer < p.layers[1]):
                if start != at:
                    return False
                at = end
            if at != self.prompt_len:
                return False
        return True

    def _end_lease(self) -> list[ReceiverAction]:
        return [Revoke(self.room)] if self._leased and self._sent is not None else []

    def _settle(self) -> list[ReceiverAction]:
        if self.state is Receiving.FAILED and self.unfenced == 0:
            self._become(Receiving.FENCED)
            return self._observe("release", True)
        return []


def _area(part: Slice) -> int:
    return (part.layers[1] - part.layers[0]) * (part.end - part.start)


def _same(one: Slice, other: Slice) -> bool:
    return (one.layers, one.start, one.end) == (other.layers, other.start, other.end)
