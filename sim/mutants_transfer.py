"""Planted bugs in how KV moves and is fenced: see `sim.mutations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.rank import RankProcess
from transfer.actions import Peer, ReceiverAction, Send, SenderAction
from transfer.messages import Destinations, Finished, Stop, Stopped
from transfer.plan import TransferPlan
from transfer.receiver import ReceivingSide
from transfer.receiving_room import Receiving, ReceivingRoom
from transfer.sender import SendingSide
from transfer.sending_room import Flow, Sending, SendingRoom

Patches = list[tuple[object, str, Any]]


def early_decode() -> Patches:
    original = ReceivingRoom.finished

    def finished(self: ReceivingRoom, peer: Peer, message: Finished) -> list[ReceiverAction]:
        actions = original(self, peer, message)
        token_here = self._token or not any(origin.needs_token for origin in self.origins.values())
        if self.state is Receiving.RECEIVING and token_here:
            self._become(Receiving.DONE)
            actions += self._observe("transfer", True, payload=self._token)
        return actions

    return [(ReceivingRoom, "finished", finished)]


def damage_ignored() -> Patches:
    original = ReceivingSide.verified

    def verified(self: ReceivingSide, room: str, source: int, number: int, sound: bool) -> list[ReceiverAction]:
        return original(self, room, source, number, True)

    return [(ReceivingSide, "verified", verified)]


def fenced_while_asked_again() -> Patches:
    original = ReceivingRoom.verified

    def verified(self: ReceivingRoom, source: int, number: int, sound: bool) -> list[ReceiverAction]:
        fenced = source in self.origins and self.origins[source].fenced
        actions = original(self, source, number, sound)
        if fenced:
            self.origins[source].fenced = True
        return actions

    return [(ReceivingRoom, "verified", verified)]


def lease_not_awaited() -> Patches:
    def unfenced(self: ReceivingRoom) -> int:
        return 0 if self._sent is None else sum(not origin.fenced for origin in self.origins.values())

    return [(ReceivingRoom, "unfenced", property(unfenced))]


def no_sampler() -> Patches:
    original = ReceivingRoom.ready

    def ready(self: ReceivingRoom, epoch: int, plan: TransferPlan, rank: int) -> list[ReceiverAction]:
        actions = original(self, epoch, plan, rank)
        for number, origin in list(self.origins.items()):
            if origin.flow.layers == (0, 0):
                del self.origins[number]
        return actions

    return [(ReceivingRoom, "ready", ready)]


def submit_after_stopped() -> Patches:
    original = SendingRoom.written

    def written(self: SendingRoom, start: int, end: int, layers: tuple[int, int]) -> list[SenderAction]:
        if self.state is not Sending.FAILED or self._pages is None:
            return original(self, start, end, layers)
        for layer in range(*layers):
            index = layer - self._layers[0]
            self._written[index] = max(self._written[index], end)
        return [action for flow in self.flows.values() if flow.pages for action in self._submit(flow)]

    return [(SendingRoom, "written", written)]


def failed_is_quiet() -> Patches:
    original = SendingSide.completed

    def completed(self: SendingSide, handle: int, error: str | None, quiet: bool = False) -> list[SenderAction]:
        return original(self, handle, error, True)

    return [(SendingSide, "completed", completed)]


def stopped_at_once() -> Patches:
    return [(Flow, "quiet", property(lambda self: True))]


def unacked_done() -> Patches:
    original = SendingRoom._finish

    def finish(self: SendingRoom, flow: Flow) -> list[SenderAction]:
        actions = original(self, flow)
        flow.acked = flow.acked or flow.finished is not None
        return actions

    return [(SendingRoom, "_finish", finish)]


def no_repeat() -> Patches:
    return [(ReceivingRoom, "repeat", lambda self, peer: [])]


def death_is_an_edge() -> Patches:
    def sender(self: SendingSide, instance: str, epoch: int, *rest: Any, **named: Any) -> list[SenderAction]:
        actions = _sender_lost(self, instance, epoch, *rest, **named)
        self._lost.pop(f"{instance}#{epoch}")
        return actions

    def receiver(self: ReceivingSide, instance: str, epoch: int, *rest: Any, **named: Any) -> list[ReceiverAction]:
        actions = _receiver_lost(self, instance, epoch, *rest, **named)
        self._dead.pop(f"{instance}#{epoch}")
        return actions

    return [(SendingSide, "peer_lost", sender), (ReceivingSide, "peer_lost", receiver)]


_sender_lost, _receiver_lost = SendingSide.peer_lost, ReceivingSide.peer_lost


def lost_is_dead() -> Patches:
    def lost(self: ReceivingSide, instance: str, epoch: int, reason: str, dead: bool) -> list[ReceiverAction]:
        return _receiver_lost(self, instance, epoch, reason, True)

    return [(ReceivingSide, "peer_lost", lost)]


def early_destinations_dropped() -> Patches:
    def park(self: SendingSide, peer: Peer, message: Any) -> list[SenderAction]:
        return []

    return [(SendingSide, "_park", park)]


def no_stop_tombstone() -> Patches:
    original = SendingSide._on_stop

    def on_stop(self: SendingSide, peer: Peer, message: Stop) -> list[SenderAction]:
        if message.room not in self._rooms:
            self._parked.pop(message.room)
            return [Send(peer, Stopped(message.room))]
        return original(self, peer, message)

    return [(SendingSide, "_on_stop", on_stop)]


def stop_only_answered() -> Patches:
    original = SendingSide._on_stop

    def on_stop(self: SendingSide, peer: Peer, message: Stop) -> list[SenderAction]:
        if message.room not in self._rooms:
            return [Send(peer, Stopped(message.room))]
        return original(self, peer, message)

    return [(SendingSide, "_on_stop", on_stop)]


def no_close_tombstone() -> Patches:
    original = SendingSide.close

    def close(self: SendingSide, room: str) -> list[SenderAction]:
        actions = original(self, room)
        self._over.pop(room)
        return actions

    return [(SendingSide, "close", close)]


def no_parking_tombstone() -> Patches:
    original = SendingSide._park

    def park(self: SendingSide, peer: Peer, message: Destinations) -> list[SenderAction]:
        actions = original(self, peer, message)
        self._over.pop(message.room)
        return actions

    return [(SendingSide, "_park", park)]


def token_unchecked() -> Patches:
    return [(SendingRoom, "opened_by", lambda self, token: True)]


def tail_not_lived() -> Patches:
    def after(self: RankProcess, delay: int, action: Callable[..., object], *args: Any) -> None:
        self.world.clock.after(delay, action, *args)

    return [(RankProcess, "after_living", after)]


def tail_ignored() -> Patches:
    original = SendingRoom.engine_replaced

    def replaced(self: SendingRoom, peer_rank: int, handle: int, engine: int) -> list[SenderAction]:
        actions = original(self, peer_rank, handle, engine)
        return actions + self.tail_passed(self.flows[peer_rank].peer, engine)

    return [(SendingRoom, "engine_replaced", replaced)]
