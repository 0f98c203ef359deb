"""A prefill rank's end of the KV transfer, in the control loop's terms.

In: the log's room effects, and what the executor has written. Out: observations. KV is pushed as soon as
it is written, while later layers, or the next batch, compute.
"""

from __future__ import annotations

from pipeline.effects import CloseRoom, FirstToken, OpenRoom, RoomEffect, SendDestinations, StartSender, StopRoom
from pipeline.local import Observation
from pipeline.planner import Batch
from transfer.actions import Observe
from transfer.io.sending_port import SendingPort


class PrefillPort:
    """`pipeline.io.driver.Port` over a `SendingPort`."""

    def __init__(self, port: SendingPort, sampler: bool) -> None:
        self._port, self._sampler = port, sampler
        self.register = port.register

    def perform(self, effect: RoomEffect) -> list[Observation]:
        match effect:
            case OpenRoom(key, peer, prompt_len, token):
                return _seen(self._port.open(key.room, peer.instance, peer.epoch, prompt_len, token))
            case StartSender(room, pages):
                return _seen(self._port.start(room, pages))
            case FirstToken(room, payload):
                return _seen(self._port.first_token(room, payload)) if self._sampler else []
            case StopRoom(room, reason):
                return _seen(self._port.stop(room, reason))
            case CloseRoom(room):
                return _seen(self._port.close(room))
            case SendDestinations():
                raise AssertionError("a prefill instance receives no KV")

    def wrote(self, batch: Batch, layers: tuple[int, int]) -> list[Observation]:
        observed: list[Observe] = []
        for row in batch.rows:
            observed += self._port.written(row.key.room, row.start, row.start + len(row.tokens), layers)
        return _seen(observed)

    def on_readable(self) -> list[Observation]:
        return _seen(self._port.on_readable())

    def tick(self) -> list[Observation]:
        return _seen(self._port.tick())

    def status(self) -> tuple[int, int, dict[str, int], dict[str, int]]:
        side, slot, link = self._port.side, self._port.slot, self._port.link.counters
        engines = slot.counters()
        counters = {
            "kv_bytes_sent": engines.bytes_done,
            "transfers_done": side.counters.done,
            "transfers_failed": side.counters.failed,
            "handles_failed": engines.handles_failed,
            "slices_sent_again": side.counters.again,
            "rooms_unauthorized": side.counters.unauthorized,
            "engine_replacements": slot.replacements,
            "frames_dropped": link.malformed + link.unbound,
            "peers_refused": self._port.link.refused + link.refused,
        }
        queues = {
            "unproven_handles": side.unproven(),  # they hold our pages until their engine is replaced
            "trailing_handles": side.trailing(),  # they hold pages of decode ranks until the tail has passed
            "held_writes": self._port.held,
        }
        return len(side.rooms()), slot.handles_outstanding, queues, counters

    def close(self) -> None:
        self._port.close_port()


def _seen(observed: list[Observe]) -> list[Observation]:
    return [Observation(o.room, o.topic, o.good, o.reason, o.payload) for o in observed]
