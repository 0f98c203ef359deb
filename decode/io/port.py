"""A decode rank's end of the KV transfer, in the control loop's terms.

In: the log's room effects, and what the bootstrap service says of prefill instances. Out: observations.

An instance is asked for its ranks' addresses when a room needs an incarnation that is not known yet,
and again while rooms wait for one that has gone silent. An answer of a newer epoch proves that every
process of the older one is dead (its daemon reaps them first); after the backend's bounded tail that
fences what the old one might still have written.
"""

from __future__ import annotations

import time

import zmq

from decode.io.bootstrap import Bootstrap, Found
from pipeline.effects import CloseRoom, FirstToken, OpenRoom, RoomEffect, SendDestinations, StartSender, StopRoom
from pipeline.local import Observation
from pipeline.planner import Batch
from security.secrets import Secrets
from transfer.actions import NeedPeer, Observe
from transfer.io.receiving_port import ReceivingPort

ASK_AGAIN = 5.0  # seconds between questions about an instance that rooms wait for
# Seconds for which sockets of a dead process may still deliver, with the kernel settings that
# docs/operations.md asks for; measured below 15 s.
TAIL = 20.0
MOST_PER_TICK = 2.0


class DecodePort:
    """`pipeline.io.driver.Port` over a `ReceivingPort`."""

    def __init__(self, port: ReceivingPort, secrets: Secrets | None = None) -> None:
        self._port = port
        self._bootstrap = Bootstrap(secrets)
        self._addresses: dict[str, str] = {}  # instance → gRPC address it was last named with
        self._epochs: dict[str, int] = {}  # instance → the incarnation whose ranks we know
        self._asked: dict[str, float] = {}
        self._dying: list[tuple[float, str, int]] = []  # (seconds its tail has still to run, instance, epoch)
        self._last_tick = time.monotonic()

    def register(self, poller: zmq.Poller) -> None:
        self._port.register(poller)
        poller.register(self._bootstrap.fd, zmq.POLLIN)

    def perform(self, effect: RoomEffect) -> list[Observation]:
        match effect:
            case OpenRoom(key, peer, prompt_len, token):
                self._addresses[peer.instance] = peer.address
                if peer.epoch == 0 or peer.epoch > self._epochs.get(peer.instance, 0):
                    self._ask(peer.instance, peer.epoch)
                return self._seen(self._port.open(key.room, peer.instance, peer.epoch, prompt_len, token))
            case SendDestinations(room, pages):
                return self._seen(self._port.send_destinations(room, pages))
            case StopRoom(room, reason):
                return self._seen(self._port.stop(room, reason))
            case CloseRoom(room):
                return self._seen(self._port.close(room))
            case StartSender() | FirstToken():
                raise AssertionError("a decode instance sends no KV")

    def wrote(self, batch: Batch, layers: tuple[int, int]) -> list[Observation]:
        return []

    def on_readable(self) -> list[Observation]:
        seen = self._seen(self._port.on_readable())
        for answer in self._bootstrap.answers():
            if isinstance(answer, Found):
                seen += self._meet(answer)
            else:
                seen += self._seen(self._port.peer_refused(answer.instance, answer.reason))
        return seen

    def tick(self) -> list[Observation]:
        now = time.monotonic()
        seen = self._seen(self._port.tick())
        for instance, _ in self._port.side.awaited():
            if now - self._asked.get(instance, 0.0) > ASK_AGAIN:
                self._ask(instance, 0)
        # A rank that stood still has not yet taken what waits in its own kernel: only time it lived through counts.
        passed, self._last_tick = min(now - self._last_tick, MOST_PER_TICK), now
        dying = [(left - passed, instance, epoch) for left, instance, epoch in self._dying]
        self._dying = [item for item in dying if item[0] > 0]
        for _, instance, epoch in (item for item in dying if item[0] <= 0):
            seen += self._seen(self._port.peer_dead(instance, epoch, f"{instance} epoch {epoch} is dead"))
        return seen

    def status(self) -> tuple[int, int, dict[str, int], dict[str, int]]:
        side, engine, link = self._port.side, self._port.engine, self._port.link_counters
        counters = {
            "transfers_done": side.counters.done,
            "transfers_failed": side.counters.failed,
            "slices_damaged": side.counters.damaged,
            "frames_dropped": link.malformed + link.unbound,
        }
        queues = {"unfenced_sources": side.unfenced(), "handshakes": self._bootstrap.asking}
        return len(side.rooms()), engine.handles_outstanding, queues, counters

    def close(self) -> None:
        self._bootstrap.close()
        self._port.close_port()

    def _ask(self, instance: str, epoch: int) -> None:
        self._asked[instance] = time.monotonic()
        self._bootstrap.ask(instance, self._addresses[instance], epoch)

    def _meet(self, found: Found) -> list[Observation]:
        there = found.description.instance
        known = self._epochs.get(found.instance, 0)
        if there.epoch > known:
            if known:
                self._dying.append((TAIL, found.instance, known))
            self._epochs[found.instance] = there.epoch
        addresses = [rank.link_address for rank in found.description.ranks]
        return self._seen(self._port.introduce(found.instance, addresses))

    def _seen(self, observed: list[Observe | NeedPeer]) -> list[Observation]:
        seen: list[Observation] = []
        for item in observed:
            if isinstance(item, NeedPeer):
                self._ask(item.instance, item.epoch)
            else:
                seen.append(Observation(item.room, item.topic, item.good, item.reason, item.payload))
        return seen
