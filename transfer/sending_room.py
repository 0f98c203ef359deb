"""One room on one prefill rank.

In: destinations, source pages, "this KV is in the pool", completions, stops.
Out: actions. A room is bound to one incarnation of a decode instance by the first
destinations it gets (or by the log); each target of the plan is a `Flow`.

    bootstrapping -> ready -> sending -> draining -> done
          any of these -> failed                (done and failed absorb)

Invariants: nothing is submitted outside `sending`, but for what a target asks for again
while `draining`, hence nothing after `Stopped`;
`Finished` and `Stopped` are said to a target only when each handle that writes to it
has ended well or is proven quiet; a handle that ended badly is *unproven*, it may still
read our pages and write theirs, so it blocks both `Stopped` and the release of our own
pages. The end of its engine makes it *trailing*: it reads nothing any more, so our pages
are released, but what the kernel took of it may still land, so `Stopped` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hmac import compare_digest

from .actions import Observe, Peer, Send, SenderAction, Submit
from .extents import extents, spans
from .messages import Destinations, Failed, Finished, Slice, Stopped
from .plan import Target, TransferPlan

SLICE_PAGES = 1 << 16  # pages times layers: their checksums must fit a frame
# Handles of a flow. To a slow or stopped target the layers of all chunks would pile up until the engine takes no
# more, of any room; what waits here leaves as fewer and larger ones instead.
IN_FLIGHT = 16


class Sending(Enum):
    BOOTSTRAPPING = "bootstrapping"
    READY = "ready"
    SENDING = "sending"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


LEGAL: dict[Sending, tuple[Sending, ...]] = {
    Sending.BOOTSTRAPPING: (Sending.READY, Sending.FAILED),
    Sending.READY: (Sending.SENDING, Sending.FAILED),
    Sending.SENDING: (Sending.DRAINING, Sending.FAILED),
    Sending.DRAINING: (Sending.DONE, Sending.FAILED),
    Sending.DONE: (),
    Sending.FAILED: (),
}


@dataclass(slots=True)
class _Part:
    """One slice: a handle's worth of a flow."""

    number: int
    layers: tuple[int, int]
    start: int
    end: int
    instead_of: int | None = None


@dataclass(slots=True)
class Flow:
    """What this room sends to one target."""

    peer: Peer
    target: Target
    needs_token: bool
    pages: tuple[int, ...] | None = None
    sent: list[int] = field(default_factory=list)  # per layer of the target: positions submitted
    pending: dict[int, _Part] = field(default_factory=dict)
    landed: list[Slice] = field(default_factory=list)
    again: dict[int, None] = field(default_factory=dict)  # numbers of slices that were asked for once more
    unproven: dict[int, None] = field(default_factory=dict)
    trailing: dict[int, int] = field(default_factory=dict)  # handle -> the replacement that ended its engine
    slices: int = 0
    finished: Finished | None = None
    acked: bool = False
    stopped: bool = False

    @property
    def source_quiet(self) -> bool:
        """Nothing reads our pages for it."""
        return not self.pending and not self.unproven

    @property
    def quiet(self) -> bool:
        """Nor can anything of it land."""
        return self.source_quiet and not self.trailing


class SendingRoom:
    def __init__(
        self,
        room: str,
        instance: str,
        epoch: int,
        prompt_len: int,
        layers: tuple[int, int],
        page_size: int,
        checksums: bool,
        allocate: Callable[[SendingRoom, int], int],
        token: bytes = b"",
    ) -> None:
        """`allocate(room, target rank)` hands out a handle that nothing else ever had."""
        self.room, self.instance, self.epoch, self.prompt_len = room, instance, epoch, prompt_len
        self._expected = token
        self._allocate = allocate
        self._page_size = page_size
        self._checksums = checksums
        self.state = Sending.BOOTSTRAPPING
        self.reason = ""
        self.closed = False
        self.flows: dict[int, Flow] = {}
        self.plan: TransferPlan | None = None
        self._layers = layers
        self._written = [0] * (layers[1] - layers[0])
        self._pages: tuple[int, ...] | None = None
        self._token: bytes | None = None
        self._told: dict[str, bool] = {}

    # ---- what others ask

    @property
    def ended(self) -> bool:
        return self.state in (Sending.DONE, Sending.FAILED)

    @property
    def quiet(self) -> bool:
        """Nothing of this room is in flight, and nothing ever will be."""
        return self.ended and all(flow.quiet for flow in self.flows.values())

    @property
    def pending(self) -> int:
        return sum(len(flow.pending) for flow in self.flows.values())

    @property
    def unproven(self) -> int:
        return sum(len(flow.unproven) for flow in self.flows.values())

    @property
    def trailing(self) -> int:
        return sum(len(flow.trailing) for flow in self.flows.values())

    def fits(self, instance: str, epoch: int) -> bool:
        return self.instance == instance and self.epoch in (0, epoch)

    def opened_by(self, token: bytes) -> bool:
        """Whether whoever says this may speak for the target side."""
        return compare_digest(self._expected, token)

    # ---- what happens to it

    def destinations(self, peer: Peer, message: Destinations, plan: TransferPlan, rank: int) -> list[SenderAction]:
        """Destinations of a fitting peer. Repeats are harmless; contradictions end the room."""
        if self.ended:
            return self.repeat(peer)
        if self.plan is None:
            self._bind(peer, plan, rank)
        flow = self.flows.get(peer.rank)
        if flow is None:
            return self.fail(f"{peer} is no target of rank {rank}")
        if message.tokens != self.prompt_len:
            return self.fail(f"prompt length: {self.prompt_len} here, {message.tokens} at {peer}")
        if len(message.pages) * self._page_size < self.prompt_len:
            return self.fail(f"{len(message.pages)} pages of {peer} do not hold {self.prompt_len} positions")
        if flow.pages is not None:
            return [] if flow.pages == message.pages else self.fail(f"{peer} changed its destinations")
        flow.pages = message.pages
        if any(other.pages is None for other in self.flows.values()):
            return []
        self._become(Sending.READY)
        actions: list[SenderAction] = self._observe("bootstrap", True)
        return actions + self._advance()

    def start(self, pages: Sequence[int]) -> list[SenderAction]:
        if self.ended or self._pages is not None:
            return []
        need = -(-self.prompt_len // self._page_size)
        if len(pages) < need:
            return self.fail(f"{len(pages)} source pages do not hold {self.prompt_len} positions")
        self._pages = tuple(pages[:need])
        return self._advance()

    def written(self, start: int, end: int, layers: tuple[int, int]) -> list[SenderAction]:
        if self.ended:
            return []
        assert self._layers[0] <= layers[0] <= layers[1] <= self._layers[1], f"{layers} are not this rank's layers"
        assert 0 <= start <= end <= self.prompt_len, f"[{start}, {end}) is not in a prompt of {self.prompt_len}"
        for layer in range(*layers):
            index = layer - self._layers[0]
            assert start <= self._written[index], f"layer {layer}: [{self._written[index]}, {start}) was never written"
            self._written[index] = max(self._written[index], end)
        return self._advance()

    def first_token(self, payload: bytes) -> list[SenderAction]:
        if self.ended or self._token is not None:
            return []
        self._token = payload
        return self._advance()

    def completed(
        self, peer_rank: int, handle: int, error: str | None, proven: bool, checksums: bytes
    ) -> list[SenderAction]:
        """A handle ended; `proven`: it neither reads nor writes any more. An unproven one may end well later."""
        flow = self.flows[peer_rank]
        part = flow.pending.pop(handle, None)
        flow.unproven.pop(handle, None)
        if not proven:
            flow.unproven[handle] = None
        actions: list[SenderAction] = []
        if error is None and part is not None and not self.ended:
            landed = Slice(self.room, part.number, part.layers, part.start, part.end, checksums, part.instead_of)
            flow.landed.append(landed)
            actions.append(Send(flow.peer, landed))
        if error is not None:
            actions += self.fail(f"write to {flow.peer.instance} rank {flow.peer.rank}: {error}")
        return actions + (self._settle() if self.ended else self._advance())

    def engine_replaced(self, peer_rank: int, handle: int, engine: int) -> list[SenderAction]:
        """The handle's engine is destroyed: it reads our pages no more, and what is on its way may still land."""
        flow = self.flows[peer_rank]
        flow.pending.pop(handle, None)
        flow.unproven.pop(handle, None)
        flow.trailing[handle] = engine
        reason = f"the transfer engine was replaced before a write to {flow.peer.instance} rank {flow.peer.rank} ended"
        return self.fail(reason) + self._settle()

    def tail_passed(self, peer: Peer, engine: int) -> list[SenderAction]:
        flow = self.flows.get(peer.rank)
        if flow is None or flow.peer != peer:
            return []
        for handle in [handle for handle, ended in flow.trailing.items() if ended == engine]:
            del flow.trailing[handle]
        return self._settle()

    def acked(self, peer: Peer) -> list[SenderAction]:
        flow = self.flows.get(peer.rank)
        if flow is None or flow.finished is None:
            return []
        flow.acked = True
        return self._advance() if not self.ended else []

    def send_again(self, peer: Peer, number: int) -> list[SenderAction]:
        """The target found a slice damaged. It is written once more, and `Finished` said anew.

        Not after it acknowledged `Finished`: its pages may be in other use. Nor what was written anew already:
        a target that went on asking would keep us writing for ever."""
        flow = self.flows.get(peer.rank)
        if self.ended or flow is None or flow.acked:
            return self.repeat(peer)
        damaged = next((one for one in flow.landed if one.number == number), None)
        if damaged is None or damaged.instead_of is not None or number in flow.again:  # repeats are harmless
            return []
        flow.again[number] = None
        flow.finished = None
        return [self._write(flow, damaged.layers, damaged.start, damaged.end, instead_of=number)]

    def stop(self, reason: str) -> list[SenderAction]:
        """The log ended the room: it knows why, so only the release is worth telling."""
        actions = self.fail(reason, tell=False)
        return actions + self._release()

    def fail(self, reason: str, tell: bool = True) -> list[SenderAction]:
        if self.ended:
            return []
        topic = "bootstrap" if self.state is Sending.BOOTSTRAPPING else "transfer"
        self._become(Sending.FAILED)
        self.reason = reason
        actions: list[SenderAction] = self._observe(topic, False, reason) if tell else []
        actions += [Send(flow.peer, Failed(self.room, reason[:1000])) for flow in self.flows.values()]
        return actions + self._settle()

    def repeat(self, peer: Peer) -> list[SenderAction]:
        """Say again what this peer may have missed: it dialled anew, or it asked."""
        flow = self.flows.get(peer.rank)
        if self.state is Sending.FAILED:
            actions: list[SenderAction] = [Send(peer, Failed(self.room, self.reason[:1000]))]
            if flow is None or flow.quiet:
                actions.append(Send(peer, Stopped(self.room)))
            return actions
        if flow is None or flow.acked:
            return []
        said: list[SenderAction] = [Send(peer, message) for message in flow.landed]
        return said if flow.finished is None else [*said, Send(peer, flow.finished)]

    # ---- inside

    def _become(self, state: Sending) -> None:
        assert state in LEGAL[self.state], f"{self.room}: {self.state.value} -> {state.value}"
        self.state = state

    def _observe(self, topic: str, good: bool, reason: str = "") -> list[SenderAction]:
        if topic in self._told:
            return []
        self._told[topic] = good
        return [Observe(self.room, topic, good, reason)]

    def _bind(self, peer: Peer, plan: TransferPlan, rank: int) -> None:
        self.epoch, self.plan = peer.epoch, plan
        for target in plan.targets(rank):
            self.flows[target.rank] = Flow(
                peer=Peer(peer.instance, peer.epoch, target.rank),
                target=target,
                needs_token=rank == plan.sampler and target.rank == 0,
                sent=[plan.source.first(layer, self.prompt_len) for layer in range(*target.layers)],
            )

    def _advance(self) -> list[SenderAction]:
        actions: list[SenderAction] = []
        if self.state is Sending.READY and self._pages is not None:
            self._become(Sending.SENDING)
        if self.state is Sending.SENDING:
            for flow in self.flows.values():
                actions += self._submit(flow)
            if all(sent == self.prompt_len for flow in self.flows.values() for sent in flow.sent):
                self._become(Sending.DRAINING)
        for flow in self.flows.values():
            actions += self._finish(flow)
        if self.state is Sending.DRAINING and all(flow.acked for flow in self.flows.values()):
            self._become(Sending.DONE)
            actions += self._observe("transfer", True)
        return actions

    def _submit(self, flow: Flow) -> Iterator[Submit]:
        """What is in our pool and not yet on its way, as few handles as the layers allow; the rest when these end."""
        offset = flow.target.layers[0] - self._layers[0]
        first = 0
        while first < len(flow.sent) and len(flow.pending) < IN_FLIGHT:
            start, end = flow.sent[first], self._written[offset + first]
            last = first + 1
            while last < len(flow.sent) and (flow.sent[last], self._written[offset + last]) == (start, end):
                last += 1
            if start < end:
                flow.sent[first:last] = [end] * (last - first)
                layers = (flow.target.layers[0] + first, flow.target.layers[0] + last)
                step = self._page_size * max(1, SLICE_PAGES // (last - first))
                for begin in range(start, end, step):
                    yield self._write(flow, layers, begin, min(end, begin + step))
            first = last

    def _write(
        self, flow: Flow, layers: tuple[int, int], start: int, end: int, instead_of: int | None = None
    ) -> Submit:
        assert flow.pages is not None and self._pages is not None
        handle = self._allocate(self, flow.peer.rank)
        flow.pending[handle] = _Part(flow.slices, layers, start, end, instead_of)
        flow.slices += 1
        runs = tuple(extents(self._pages, flow.pages, start, end, self._page_size))
        parts = tuple(spans(self._pages, start, end, self._page_size)) if self._checksums else ()
        return Submit(flow.peer, handle, self.room, layers, flow.target.heads, runs, parts)

    def _finish(self, flow: Flow) -> list[SenderAction]:
        if self.ended or flow.finished is not None or flow.pages is None or not flow.quiet:
            return []
        if self.state not in (Sending.SENDING, Sending.DRAINING) or (flow.needs_token and self._token is None):
            return []
        if any(sent != self.prompt_len for sent in flow.sent):
            return []
        assert self.plan is not None
        flow.finished = Finished(
            room=self.room,
            tokens=self.prompt_len,
            layers=flow.target.layers,
            nbytes=self.plan.bytes(flow.target, self.prompt_len),
            slices=flow.slices,
            again=len(flow.again),
            first_token=self._token if flow.needs_token else None,
        )
        return [Send(flow.peer, flow.finished)]

    def _settle(self) -> list[SenderAction]:
        """Failed: fence each target as soon as its own handles have ended well or are proven quiet."""
        actions: list[SenderAction] = []
        if self.state is Sending.FAILED:
            for flow in self.flows.values():
                if flow.quiet and not flow.stopped:
                    flow.stopped = True
                    actions.append(Send(flow.peer, Stopped(self.room)))
            actions += self._release()
        return actions

    def _release(self) -> list[SenderAction]:
        source_quiet = self.ended and all(flow.source_quiet for flow in self.flows.values())
        return self._observe("release", True) if source_quiet else []
